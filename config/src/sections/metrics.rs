//! `[metrics]`

use super::section;
use std::net::SocketAddr;

section! {
    /// Metrics in Prometheus form.
    MetricsConfig = "metrics" {
        /// The address on which metrics are served; unset, they are not.
        address: Option<SocketAddr> = "",
    }
}

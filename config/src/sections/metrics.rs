//! `[metrics]`

use super::section;
use std::net::SocketAddr;

section! {
    /// Metrics in Prometheus format.
    MetricsConfig = "metrics" {
        /// The address at which metrics are served; unset, none are served.
        address: Option<SocketAddr> = "",
        /// The address at which `ryz launch` serves its own metrics, such as restarts; unset, none are served.
        launcher_address: Option<SocketAddr> = "",
    }
}

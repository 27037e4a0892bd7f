//! Logs with job, epoch and rank, metrics in Prometheus format, and spans for OpenTelemetry collectors and NVIDIA's profilers.
//!
//! All are process-wide, so an application sets up its own telemetry instead of calling these.

mod exporter;
mod logs;
mod otlp;

use std::io;
use std::net::SocketAddr;

use metrics_exporter_prometheus::{Matcher, PrometheusBuilder};
use ryzanstein_config::{Config, LogConfig, MetricsConfig};
use tracing_subscriber::{Layer, Registry, layer::SubscriberExt as _, util::SubscriberInitExt as _};

use crate::metric_names;
use crate::rendezvous::Environment;

type BoxedLayer = Box<dyn Layer<Registry> + Send + Sync>;

/// The reason why telemetry could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum TelemetryError {
    /// The filter cannot be parsed.
    #[error(
        "{key}: expected a level (off, error, warn, info, debug, trace), or levels by module as in \
         `info,ryzanstein_process_group=debug`, not `{level}` ({why})"
    )]
    Filter {
        /// The setting.
        key: &'static str,
        /// Value of the setting.
        level: String,
        /// The fault in the value.
        why: String,
    },
    /// The process already has a subscriber.
    #[error("logging is already set up: {0}")]
    Twice(#[from] tracing_subscriber::util::TryInitError),
    /// The process already records metrics.
    #[error(
        "this process already records metrics with another recorder; serve them from there, and unset {0}"
    )]
    SecondRecorder(&'static str),
    /// The metrics cannot be served.
    #[error("cannot serve metrics at {address} ({key}): {source}")]
    Metrics {
        /// The setting.
        key: &'static str,
        /// The address.
        address: SocketAddr,
        /// The system's error.
        source: std::io::Error,
    },
    /// Spans cannot be sent.
    #[error(
        "{key} is `{endpoint}`, and spans cannot be sent there: {why}; expected http://HOST:PORT, where a collector takes OTLP over \
         gRPC"
    )]
    Spans {
        /// The setting or the variable.
        key: &'static str,
        /// Value of the setting or the variable.
        endpoint: String,
        /// The failure.
        why: String,
    },
}

/// The origin of logs and spans: the identity of this process.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Origin {
    /// The job's name.
    pub job: String,
    /// The epoch, if a launcher has set it.
    pub epoch: Option<u32>,
    /// The rank; `None` in a launcher.
    pub rank: Option<u32>,
}

impl Origin {
    /// Returns the origin of a rank with these settings and this environment.
    pub fn of_rank(config: &Config, environment: &Environment) -> Self {
        let number = |name: &str| environment.get(name).and_then(|text| text.parse().ok());
        Self { job: config.job.name.clone(), epoch: number("RYZ_EPOCH"), rank: number("RANK") }
    }

    /// Returns the origin of the launcher of a job with these settings.
    pub fn of_launcher(config: &Config) -> Self {
        Self { job: config.job.name.clone(), epoch: None, rank: None }
    }
}

/// Starts logging to stderr.
///
/// # Errors
/// [`TelemetryError`] when the filter cannot be parsed or logging is already set up.
pub fn log_to_stderr(config: &LogConfig, origin: &Origin) -> Result<(), TelemetryError> {
    log_to(config, origin, std::io::stderr)
}

/// Starts logging to the result of `writer`. Each line is one `write`.
///
/// # Errors
/// Returns the errors of [`log_to_stderr`].
pub fn log_to<W: std::io::Write + 'static>(
    config: &LogConfig,
    origin: &Origin,
    writer: impl Fn() -> W + Send + Sync + 'static,
) -> Result<(), TelemetryError> {
    Ok(tracing_subscriber::registry().with(logs::layer(config, origin, writer)?).try_init()?)
}

/// Sends the last spans when it is dropped, which takes a quarter of a second at most.
#[derive(Debug)]
#[must_use = "dropped at once, it ends the sending of spans"]
pub struct Spans {
    _export: Option<otlp::Export>,
}

/// Starts logging to stderr, and sends spans to a collector if `otlp.endpoint` or its standard variables name one.
///
/// A collector that does not answer blocks nothing: spans that it does not take are dropped.
///
/// # Errors
/// Returns the errors of [`log_to_stderr`], and [`TelemetryError::Spans`].
pub fn start(config: &Config, origin: &Origin, environment: &Environment) -> Result<Spans, TelemetryError> {
    let mut layers = vec![logs::layer(&config.log, origin, std::io::stderr)?];
    let export = match otlp::endpoint(&config.otlp, environment) {
        Some(endpoint) => {
            let (export, layer) = otlp::start(&config.otlp, origin, endpoint)?;
            layers.push(layer);
            Some(export)
        }
        None => None,
    };
    tracing_subscriber::registry().with(layers).try_init()?;
    Ok(Spans { _export: export })
}

/// Upper bounds of the buckets of durations, in seconds: from a small all-reduce to a timeout. There are twelve, as each is a
/// time series.
const SECONDS: [f64; 12] = [1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 10.0];

/// Serves the metrics of a rank at `metrics.address`, if it is set. The local rank is added to the port, so that the ranks of one
/// host do not collide. Returns the address.
///
/// # Errors
/// [`TelemetryError::Metrics`] when the address cannot be used, [`TelemetryError::SecondRecorder`] when the process already records
/// metrics.
pub fn serve_metrics(
    config: &MetricsConfig,
    origin: &Origin,
    local_rank: u16,
) -> Result<Option<SocketAddr>, TelemetryError> {
    let Some(mut address) = config.address else { return Ok(None) };
    if address.port() != 0 {
        let port = address.port().checked_add(local_rank).ok_or_else(|| {
            let why = format!(
                "local rank {local_rank} is added to the port, and ports end at 65535; choose a lower one"
            );
            TelemetryError::Metrics { key: "metrics.address", address, source: io::Error::other(why) }
        })?;
        address.set_port(port);
    }
    let rank = origin.rank.unwrap_or(0).to_string();
    let address = serve("metrics.address", address, PrometheusBuilder::new().add_global_label("rank", rank))?;
    let labels = [
        ("job_name", origin.job.clone()),
        ("version", crate::VERSION.to_owned()),
        ("host", crate::host_name()),
    ];
    metrics::gauge!(metric_names::INFO.name, &labels).set(1.0);
    Ok(Some(address))
}

/// Serves the metrics of a launcher at `metrics.launcher_address`, if it is set. Returns the address.
///
/// # Errors
/// Returns the errors of [`serve_metrics`].
pub fn serve_launcher_metrics(config: &MetricsConfig) -> Result<Option<SocketAddr>, TelemetryError> {
    let Some(address) = config.launcher_address else { return Ok(None) };
    let address = serve("metrics.launcher_address", address, PrometheusBuilder::new())?;
    // Created at the start, so that the first restart shows as an increase.
    metrics::counter!(metric_names::RESTARTS.name).increment(0);
    Ok(Some(address))
}

fn serve(
    key: &'static str,
    address: SocketAddr,
    builder: PrometheusBuilder,
) -> Result<SocketAddr, TelemetryError> {
    let durations = Matcher::Suffix("_seconds".into());
    let builder = builder.set_buckets_for_metric(durations, &SECONDS).expect("there are buckets");
    let recorder = builder.build_recorder();
    let refused = |source| TelemetryError::Metrics { key, address, source };
    let (listener, page) = (exporter::bind(address).map_err(refused)?, recorder.handle());
    metrics::set_global_recorder(recorder).map_err(|_| TelemetryError::SecondRecorder(key))?;
    let address = exporter::serve(listener, page).map_err(refused)?;
    metric_names::describe();
    Ok(address)
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::net::{TcpListener, TcpStream};

    use super::*;

    #[test]
    fn metrics_are_served_with_the_rank_and_the_port_moved_up_by_the_local_rank() {
        let free = TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("an address");
        let base = SocketAddr::new(free.ip(), free.port() - 1);
        let config = MetricsConfig { address: Some(base), ..MetricsConfig::default() };
        let origin = Origin { rank: Some(5), ..Origin::default() };
        assert_eq!(serve_metrics(&config, &origin, 1).expect("served"), Some(free));
        let mut stream = TcpStream::connect(free).expect("connected");
        stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").expect("asked");
        let mut page = String::new();
        stream.read_to_string(&mut page).expect("answered");
        assert!(page.contains("ryz_info{rank=\"5\""), "{page}");
        let last = SocketAddr::new(free.ip(), u16::MAX);
        let config = MetricsConfig { address: Some(last), ..MetricsConfig::default() };
        let error = serve_metrics(&config, &origin, 1).expect_err("no such port").to_string();
        assert!(error.contains("local rank 1 is added to the port"), "{error}");
    }
}

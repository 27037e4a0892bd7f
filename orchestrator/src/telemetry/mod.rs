//! Logs with the rank on every line, and metrics in Prometheus form.
//!
//! Both are the process's own, so a program that embeds the engine sets up its own instead of calling these.

pub mod names;

use std::fmt;
use std::net::SocketAddr;

use metrics_exporter_prometheus::PrometheusBuilder;
use ryzanstein_config::{LogConfig, LogFormat, MetricsConfig};
use tracing_subscriber::fmt::format::{FormatEvent, FormatFields, Writer};
use tracing_subscriber::fmt::{FmtContext, format};
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::{EnvFilter, Layer as _, layer::SubscriberExt as _, util::SubscriberInitExt as _};

/// Why telemetry could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum TelemetryError {
    /// The filter is not one.
    #[error("log.level: {0}")]
    Filter(#[from] tracing_subscriber::filter::ParseError),
    /// The process has a subscriber already.
    #[error("logging has been set up before: {0}")]
    Twice(#[from] tracing_subscriber::util::TryInitError),
    /// The metrics cannot be served.
    #[error("cannot serve metrics at {0} (metrics.address): {1}")]
    Metrics(SocketAddr, metrics_exporter_prometheus::BuildError),
}

/// Starts logging to stderr. `rank` goes on every line.
///
/// # Errors
/// [`TelemetryError`] when the filter cannot be read or logging is set up already.
pub fn log_to_stderr(config: &LogConfig, rank: Option<u32>) -> Result<(), TelemetryError> {
    let filter = EnvFilter::try_new(&config.level)?;
    let layer = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
    let layer = match config.format {
        // The formatter of JSON lines knows fields of spans and events only, so its lines are completed here.
        LogFormat::Json => layer
            .event_format(WithRank { rank, inner: Inner::Json(format().json().flatten_event(true)) })
            .fmt_fields(format::JsonFields::new())
            .boxed(),
        LogFormat::Text => layer
            .with_ansi(false)
            .event_format(WithRank { rank, inner: Inner::Text(format().compact().with_ansi(false)) })
            .boxed(),
    };
    tracing_subscriber::registry().with(layer.with_filter(filter)).try_init()?;
    Ok(())
}

/// A formatter that puts the rank on the line of another.
struct WithRank {
    rank: Option<u32>,
    inner: Inner,
}

enum Inner {
    Text(format::Format<format::Compact>),
    Json(format::Format<format::Json>),
}

impl<S, N> FormatEvent<S, N> for WithRank
where
    S: tracing::Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        ctx: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &tracing::Event<'_>,
    ) -> fmt::Result {
        match (&self.inner, self.rank) {
            (Inner::Text(inner), None) => inner.format_event(ctx, writer, event),
            (Inner::Text(inner), Some(rank)) => {
                write!(writer, "rank={rank} ")?;
                inner.format_event(ctx, writer, event)
            }
            (Inner::Json(inner), None) => inner.format_event(ctx, writer, event),
            (Inner::Json(inner), Some(rank)) => {
                let mut line = String::new();
                inner.format_event(ctx, Writer::new(&mut line), event)?;
                match line.strip_prefix('{') {
                    Some(rest) => write!(writer, "{{\"rank\":{rank},{rest}"),
                    None => writer.write_str(&line),
                }
            }
        }
    }
}

/// Serves metrics at `metrics.address`, if it is set, with the port moved up by the local rank so that the ranks of one
/// host do not collide. Returns where.
///
/// # Errors
/// [`TelemetryError::Metrics`] when the address cannot be used.
pub fn serve_metrics(
    config: &MetricsConfig,
    rank: u32,
    local_rank: u16,
) -> Result<Option<SocketAddr>, TelemetryError> {
    let Some(mut address) = config.address else { return Ok(None) };
    if address.port() != 0 {
        address.set_port(address.port().saturating_add(local_rank));
    }
    PrometheusBuilder::new()
        .with_http_listener(address)
        .add_global_label("rank", rank.to_string())
        .install()
        .map_err(|error| TelemetryError::Metrics(address, error))?;
    names::describe();
    metrics::gauge!(names::INFO, "version" => crate::VERSION, "host" => crate::host_name()).set(1.0);
    Ok(Some(address))
}

//! Logs with the rank on every line, and metrics in Prometheus format.
//!
//! Both are process-wide, so an embedding program sets up its own instead of calling these.

mod exporter;

use std::fmt;
use std::net::SocketAddr;

use metrics_exporter_prometheus::PrometheusBuilder;
use ryzanstein_config::{LogConfig, LogFormat, MetricsConfig};
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::fmt::format::{FormatEvent, FormatFields, Writer};
use tracing_subscriber::fmt::{FmtContext, format};
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::{EnvFilter, Layer as _, layer::SubscriberExt as _, util::SubscriberInitExt as _};

use crate::metric_names;

/// Why telemetry could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum TelemetryError {
    /// The filter cannot be parsed.
    #[error(
        "log.level: expected a level (off, error, warn, info, debug, trace), or levels by module as in \
         `info,ryzanstein_process_group=debug`, not `{level}` ({why})"
    )]
    Filter {
        /// The value of the setting.
        level: String,
        /// What is wrong with it.
        why: String,
    },
    /// The process already has a subscriber.
    #[error("logging is already set up: {0}")]
    Twice(#[from] tracing_subscriber::util::TryInitError),
    /// The process already records metrics.
    #[error(
        "this process already records metrics with another recorder; serve them from there, and unset metrics.address"
    )]
    SecondRecorder,
    /// The metrics cannot be served.
    #[error("cannot serve metrics at {address} (metrics.address): {source}")]
    Metrics {
        /// The address.
        address: SocketAddr,
        /// The system's error.
        source: std::io::Error,
    },
}

/// Starts logging to stderr, with `rank` on every line.
///
/// # Errors
/// [`TelemetryError`] when the filter cannot be parsed or logging is already set up.
pub fn log_to_stderr(config: &LogConfig, rank: Option<u32>) -> Result<(), TelemetryError> {
    log_to(config, rank, std::io::stderr)
}

/// Starts logging to what `writer` returns, with `rank` on every line. Each line is one `write`.
///
/// # Errors
/// As [`log_to_stderr`].
pub fn log_to<W: std::io::Write + 'static>(
    config: &LogConfig,
    rank: Option<u32>,
    writer: impl Fn() -> W + Send + Sync + 'static,
) -> Result<(), TelemetryError> {
    let refuse = |why| TelemetryError::Filter { level: config.level.clone(), why };
    // The parser takes any word for a module, and would show nothing of all others.
    let is_level = |part: &&str| part.contains(['=', '[']) || part.parse::<LevelFilter>().is_ok();
    if let Some(word) =
        config.level.split(',').map(str::trim).find(|part| !part.is_empty() && !is_level(part))
    {
        return Err(refuse(format!("`{word}` is not a log level")));
    }
    let filter = EnvFilter::try_new(&config.level).map_err(|error| refuse(error.to_string()))?;
    let layer = tracing_subscriber::fmt::layer().with_writer(writer);
    let layer = match config.format {
        // The JSON formatter writes only fields of spans and events, so the rank is added here.
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

/// A formatter that adds the rank to another's lines.
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
        let mut line = String::new();
        let is_json = matches!(self.inner, Inner::Json(_));
        match &self.inner {
            Inner::Text(inner) => inner.format_event(ctx, Writer::new(&mut line), event)?,
            Inner::Json(inner) => inner.format_event(ctx, Writer::new(&mut line), event)?,
        }
        // Events of the process group already have their rank.
        let has_rank = event.metadata().fields().field("rank").is_some();
        match self.rank {
            Some(rank) if !has_rank && is_json => {
                write!(writer, "{{\"rank\":{rank},{}", line.strip_prefix('{').unwrap_or(&line))
            }
            Some(rank) if !has_rank => write!(writer, "rank={rank} {line}"),
            _ => writer.write_str(&line),
        }
    }
}

/// Serves metrics at `metrics.address`, if it is set. The local rank is added to the port, so that the ranks of one host do
/// not collide. Returns the address.
///
/// # Errors
/// [`TelemetryError::Metrics`] when the address cannot be used, [`TelemetryError::SecondRecorder`] when the process already records
/// metrics.
pub fn serve_metrics(
    config: &MetricsConfig,
    rank: u32,
    local_rank: u16,
) -> Result<Option<SocketAddr>, TelemetryError> {
    let Some(mut address) = config.address else { return Ok(None) };
    if address.port() != 0 {
        address.set_port(address.port().saturating_add(local_rank));
    }
    let recorder = PrometheusBuilder::new().add_global_label("rank", rank.to_string()).build_recorder();
    let refused = |source| TelemetryError::Metrics { address, source };
    let (listener, page) = (exporter::bind(address).map_err(refused)?, recorder.handle());
    metrics::set_global_recorder(recorder).map_err(|_| TelemetryError::SecondRecorder)?;
    let address = exporter::serve(listener, page).map_err(refused)?;
    metric_names::describe();
    metrics::gauge!(metric_names::INFO, "version" => crate::VERSION, "host" => crate::host_name()).set(1.0);
    Ok(Some(address))
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::net::{TcpListener, TcpStream};
    use std::sync::{Arc, Mutex};

    use tracing_subscriber::fmt::MakeWriter;

    use super::*;

    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<u8>>>);

    impl std::io::Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().expect("not poisoned").write(bytes)
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    impl<'a> MakeWriter<'a> for Lines {
        type Writer = Self;

        fn make_writer(&'a self) -> Self {
            self.clone()
        }
    }

    fn logged(inner: Inner, rank: Option<u32>) -> String {
        let lines = Lines::default();
        let json = matches!(inner, Inner::Json(_));
        let layer = tracing_subscriber::fmt::layer().with_writer(lines.clone()).with_ansi(false);
        let layer = layer.event_format(WithRank { rank, inner });
        let layer = if json { layer.fmt_fields(format::JsonFields::new()).boxed() } else { layer.boxed() };
        tracing::subscriber::with_default(tracing_subscriber::registry().with(layer), || {
            tracing::info!(answer = 42, "hello");
        });
        String::from_utf8(lines.0.lock().expect("not poisoned").clone()).expect("text")
    }

    #[test]
    fn every_line_carries_the_rank() {
        let text = logged(Inner::Text(format().compact().with_ansi(false)), Some(3));
        assert!(text.starts_with("rank=3 ") && text.contains("hello"), "{text}");
        let json = logged(Inner::Json(format().json().flatten_event(true)), Some(3));
        let value: serde_json::Value = serde_json::from_str(&json).expect("one object");
        assert_eq!((&value["rank"], &value["answer"]), (&3.into(), &42.into()));
        assert!(!logged(Inner::Text(format().compact().with_ansi(false)), None).contains("rank"));
    }

    #[test]
    fn metrics_are_served_with_the_rank_and_the_port_moved_up_by_the_local_rank() {
        let free = TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("an address");
        let base = SocketAddr::new(free.ip(), free.port() - 1);
        let config = MetricsConfig { address: Some(base) };
        assert_eq!(serve_metrics(&config, 5, 1).expect("served"), Some(free));
        let mut stream = TcpStream::connect(free).expect("connected");
        stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").expect("asked");
        let mut page = String::new();
        stream.read_to_string(&mut page).expect("answered");
        assert!(page.contains("ryz_info{rank=\"5\""), "{page}");
    }
}

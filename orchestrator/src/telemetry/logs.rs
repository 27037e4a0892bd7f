//! Log lines, each with the origin of the process.

use std::fmt;

use ryzanstein_config::{LogConfig, LogFormat};
use tracing::Subscriber;
use tracing_subscriber::filter::{FilterExt as _, FilterFn, LevelFilter};
use tracing_subscriber::fmt::format::{FormatEvent, FormatFields, Writer};
use tracing_subscriber::fmt::{FmtContext, format};
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::{EnvFilter, Layer};

use super::{BoxedLayer, Origin, TelemetryError};

/// Parses the filter that a setting describes.
pub(super) fn filter(key: &'static str, level: &str) -> Result<EnvFilter, TelemetryError> {
    let refuse = |why| TelemetryError::Filter { key, level: level.to_owned(), why };
    // The parser takes any word for a module, and would show nothing of all others.
    let is_level = |part: &&str| part.contains(['=', '[']) || part.parse::<LevelFilter>().is_ok();
    if let Some(word) = level.split(',').map(str::trim).find(|part| !part.is_empty() && !is_level(part)) {
        return Err(refuse(format!("`{word}` is not a log level")));
    }
    EnvFilter::try_new(level).map_err(|error| refuse(error.to_string()))
}

/// Returns a layer that writes lines to the result of `writer`.
pub(super) fn layer<W: std::io::Write + 'static>(
    config: &LogConfig,
    origin: &Origin,
    writer: impl Fn() -> W + Send + Sync + 'static,
) -> Result<BoxedLayer, TelemetryError> {
    // Spans are for traces: a line has the fields of its own event.
    let events = FilterFn::new(|metadata| !metadata.is_span()).with_max_level_hint(LevelFilter::TRACE);
    let filter = filter("log.level", &config.level)?.and(events);
    let layer = tracing_subscriber::fmt::layer().with_writer(writer).with_ansi(false);
    let format = WithOrigin::new(config.format, origin);
    Ok(match config.format {
        LogFormat::Json => {
            layer.event_format(format).fmt_fields(format::JsonFields::new()).with_filter(filter).boxed()
        }
        LogFormat::Text => layer.event_format(format).with_filter(filter).boxed(),
    })
}

/// A formatter that adds the origin to another's lines: in JSON all of it, in text the rank.
pub(super) struct WithOrigin {
    inner: Inner,
    /// Names and values, as they are written.
    fields: Vec<(&'static str, String)>,
}

enum Inner {
    Text(format::Format<format::Compact>),
    Json(format::Format<format::Json>),
}

impl WithOrigin {
    pub(super) fn new(kind: LogFormat, origin: &Origin) -> Self {
        let rank = origin.rank.map(|rank| ("rank", rank.to_string()));
        let epoch = origin.epoch.map(|epoch| ("epoch", epoch.to_string()));
        match kind {
            LogFormat::Text => Self {
                inner: Inner::Text(format().compact().with_ansi(false)),
                fields: rank.into_iter().collect(),
            },
            LogFormat::Json => {
                let job = ("job", serde_json::Value::from(origin.job.as_str()).to_string());
                let json = format().json().flatten_event(true).with_current_span(false).with_span_list(false);
                Self {
                    inner: Inner::Json(json),
                    fields: [Some(job), epoch, rank].into_iter().flatten().collect(),
                }
            }
        }
    }
}

impl<S, N> FormatEvent<S, N> for WithOrigin
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        ctx: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &tracing::Event<'_>,
    ) -> fmt::Result {
        // Events of the process group already have their rank, and some have the epoch.
        let own = event.metadata().fields();
        let fields = self.fields.iter().filter(|(name, _)| own.field(name).is_none());
        match &self.inner {
            Inner::Text(inner) => {
                fields.into_iter().try_for_each(|(name, value)| write!(writer, "{name}={value} "))?;
                inner.format_event(ctx, writer, event)
            }
            Inner::Json(inner) => {
                let mut line = String::new();
                inner.format_event(ctx, Writer::new(&mut line), event)?;
                writer.write_char('{')?;
                fields.into_iter().try_for_each(|(name, value)| write!(writer, "\"{name}\":{value},"))?;
                writer.write_str(line.strip_prefix('{').unwrap_or(&line))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use tracing_subscriber::layer::SubscriberExt as _;

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

    fn logged(format: LogFormat, origin: &Origin, log: impl FnOnce()) -> String {
        let lines = Lines::default();
        let copy = lines.clone();
        let config = LogConfig { format, ..LogConfig::default() };
        let layer = layer(&config, origin, move || copy.clone()).expect("a filter");
        tracing::subscriber::with_default(tracing_subscriber::registry().with(layer), log);
        String::from_utf8(lines.0.lock().expect("not poisoned").clone()).expect("text")
    }

    fn rank_3() -> Origin {
        Origin { job: "a \"b\"".into(), epoch: Some(2), rank: Some(3) }
    }

    #[test]
    fn every_line_of_text_carries_the_rank() {
        let text = logged(LogFormat::Text, &rank_3(), || tracing::info!(answer = 42, "hello"));
        assert!(text.starts_with("rank=3 ") && text.contains("hello"), "{text}");
        let launcher = Origin { rank: None, ..rank_3() };
        let text = logged(LogFormat::Text, &launcher, || tracing::info!("hello"));
        assert!(text.contains("hello") && !text.contains("rank"), "{text}");
    }

    #[test]
    fn every_line_of_json_carries_job_epoch_and_rank_once_and_no_span() {
        let json = logged(LogFormat::Json, &rank_3(), || {
            let _span = tracing::info_span!("phase", secret = 1).entered();
            tracing::info!(answer = 42, "hello");
            tracing::warn!(rank = 7, group = "world", "slow");
        });
        let lines: Vec<serde_json::Value> =
            json.lines().map(|line| serde_json::from_str(line).expect("one object")).collect();
        let names = |line: &serde_json::Value| -> Vec<String> {
            line.as_object().expect("an object").keys().cloned().collect()
        };
        // Sorted; these names are documented.
        assert_eq!(
            names(&lines[0]),
            ["answer", "epoch", "job", "level", "message", "rank", "target", "timestamp"]
        );
        assert_eq!(
            names(&lines[1]),
            ["epoch", "group", "job", "level", "message", "rank", "target", "timestamp"]
        );
        assert_eq!((&lines[0]["job"], &lines[0]["epoch"]), (&"a \"b\"".into(), &2.into()));
        assert_eq!((&lines[0]["rank"], &lines[1]["rank"]), (&3.into(), &7.into()));
        assert_eq!(json.matches("\"rank\"").count(), 2, "{json}");
    }
}

//! Spans for an OpenTelemetry collector, by OTLP over gRPC.

use std::time::Duration;

use opentelemetry::KeyValue;
use opentelemetry::trace::TracerProvider as _;
use opentelemetry_otlp::{SpanExporter, WithExportConfig as _};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::SdkTracerProvider;
use ryzanstein_config::{HostPort, OtlpConfig};
use tracing_subscriber::filter::{FilterExt as _, FilterFn, LevelFilter};
use tracing_subscriber::layer::Layer as _;

use super::{BoxedLayer, Origin, TelemetryError, logs};
use crate::rendezvous::Environment;
use ryzanstein_process_group::RuntimeThread;

/// Timeout of a collector for the last spans at the end of a process: less than the time that a launcher gives ranks to exit
/// after a failure.
const LAST_SPANS: Duration = Duration::from_millis(250);

/// The destination of spans, and the setting or variable that gives it.
pub(super) struct Endpoint {
    key: &'static str,
    url: String,
}

/// Returns the endpoint of the settings, or else of the standard variables.
pub(super) fn endpoint(config: &OtlpConfig, environment: &Environment) -> Option<Endpoint> {
    let standard = ["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"];
    let standard = standard.into_iter().map(|name| (name, environment.get(name)));
    let all = [("otlp.endpoint", config.endpoint.as_ref())].into_iter().chain(standard);
    all.filter_map(|(key, url)| Some(Endpoint { key, url: url?.clone() })).find(|there| !there.url.is_empty())
}

/// Sends spans until it is dropped. Spans wait in a queue of bounded length; a thread of the library sends them.
#[derive(Debug)]
pub(super) struct Export {
    provider: SdkTracerProvider,
    // Declared after the provider, whose connection runs on it.
    _runtime: RuntimeThread,
}

impl Drop for Export {
    fn drop(&mut self) {
        // Spans that no collector takes are not worth an error.
        let _ = self.provider.shutdown_with_timeout(LAST_SPANS);
    }
}

/// Starts sending. It connects when there are spans to send.
pub(super) fn start(
    config: &OtlpConfig,
    origin: &Origin,
    endpoint: Endpoint,
) -> Result<(Export, BoxedLayer), TelemetryError> {
    let Endpoint { key, url } = endpoint;
    let refuse = |why: String| TelemetryError::Spans { key, endpoint: url.clone(), why };
    check(&url).map_err(refuse)?;
    let runtime = RuntimeThread::start("ryz-otlp").map_err(|error| refuse(error.to_string()))?;
    let exporter = {
        let _context = runtime.handle().enter();
        SpanExporter::builder()
            .with_tonic()
            .with_endpoint(&url)
            .build()
            .map_err(|error| refuse(error.to_string()))?
    };
    let provider =
        SdkTracerProvider::builder().with_batch_exporter(exporter).with_resource(resource(origin)).build();
    let layer =
        tracing_opentelemetry::layer().with_tracer(provider.tracer("ryzanstein")).with_location(false);
    // Spans of the exporter itself are not part of the job.
    let ours = FilterFn::new(|metadata| metadata.target().starts_with("ryz"));
    let ours = ours.with_max_level_hint(LevelFilter::TRACE);
    let layer = layer.with_filter(logs::filter("otlp.level", &config.level)?.and(ours)).boxed();
    Ok((Export { provider, _runtime: runtime }, layer))
}

/// Checks what the library would notice only when it sends: scheme, host and port.
fn check(url: &str) -> Result<(), String> {
    let (scheme, rest) = url.split_once("://").ok_or("it has no scheme")?;
    if !scheme.eq_ignore_ascii_case("http") {
        return Err(format!("`{scheme}` is not http"));
    }
    let place = rest.split(['/', '?']).next().unwrap_or_default();
    let place = place.rsplit_once('@').map_or(place, |(_, place)| place);
    // Without a port, HTTP uses 80.
    let has_port = place.rsplit_once(':').is_some_and(|(_, port)| !port.ends_with(']'));
    let place = if has_port { place.to_owned() } else { format!("{place}:80") };
    let server: HostPort = place.parse().map_err(|_| format!("`{place}` is not HOST:PORT"))?;
    if server.port() == 0 { Err("0 is no port to connect to".into()) } else { Ok(()) }
}

/// Returns the identity of the sender, in addition to the attributes in `OTEL_RESOURCE_ATTRIBUTES`.
fn resource(origin: &Origin) -> Resource {
    let epoch = origin.epoch.map(|epoch| KeyValue::new("ryz.epoch", i64::from(epoch)));
    let rank = origin.rank.map(|rank| KeyValue::new("ryz.rank", i64::from(rank)));
    Resource::builder()
        .with_service_name("ryzanstein")
        .with_attribute(KeyValue::new("service.version", crate::VERSION))
        .with_attribute(KeyValue::new("host.name", crate::host_name()))
        .with_attribute(KeyValue::new("ryz.job", origin.job.clone()))
        .with_attributes(epoch.into_iter().chain(rank))
        .build()
}

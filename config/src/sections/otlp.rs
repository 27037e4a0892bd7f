//! `[otlp]`

use super::section;

section! {
    /// Spans sent to an OpenTelemetry collector, by the protocol OTLP over gRPC.
    OtlpConfig = "otlp" {
        /// The collector, such as `http://127.0.0.1:4317`; unset, the standard variable `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT` or
        /// `OTEL_EXPORTER_OTLP_ENDPOINT`, and without those no spans are sent.
        endpoint: Option<String> = "",
        /// The filter of spans, written as `log.level`: `info` sends the phases of a job, `debug` also every collective.
        level: String = "info",
    }
}

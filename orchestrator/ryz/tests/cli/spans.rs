//! Spans of a job in an OpenTelemetry collector.

use std::collections::BTreeSet;
use std::net::{SocketAddr, TcpListener};
use std::process::Output;
use std::sync::{Arc, Mutex, PoisonError};

use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{
    TraceService, TraceServiceServer,
};
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use opentelemetry_proto::tonic::common::v1::KeyValue;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::trace::v1::Span;
use ryzanstein_tests::fixtures::folder;
use tonic::{Request, Response, Status};

use crate::support::Run;

type Requests = Arc<Mutex<Vec<ExportTraceServiceRequest>>>;

/// A collector that keeps what it gets.
struct Collector {
    address: SocketAddr,
    requests: Requests,
}

struct Service(Requests);

#[tonic::async_trait]
impl TraceService for Service {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(request.into_inner());
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

/// A span with the rank that sent it.
type OfRank = (i64, Span);

impl Collector {
    fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        listener.set_nonblocking(true).expect("set");
        let address = listener.local_addr().expect("an address");
        let requests = Requests::default();
        let service = TraceServiceServer::new(Service(Arc::clone(&requests)));
        // Until the test's process ends.
        std::thread::spawn(move || {
            let runtime =
                tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
            runtime.block_on(async {
                let listener = tokio::net::TcpListener::from_std(listener).expect("a listener");
                let incoming = tonic::transport::server::TcpIncoming::from(listener);
                tonic::transport::Server::builder().add_service(service).serve_with_incoming(incoming).await
            })
        });
        Self { address, requests }
    }

    fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// All spans, with job and epoch as they must be.
    fn spans(&self) -> Vec<OfRank> {
        let requests = self.requests.lock().unwrap_or_else(PoisonError::into_inner);
        let mut spans = Vec::new();
        for of_resource in requests.iter().flat_map(|request| &request.resource_spans) {
            let attributes = &of_resource.resource.as_ref().expect("a resource").attributes;
            assert_eq!(text(attributes, "service.name").as_deref(), Some("ryzanstein"));
            assert_eq!(text(attributes, "ryz.job").as_deref(), Some("spanned"));
            assert_eq!(number(attributes, "ryz.epoch"), Some(1));
            let rank = number(attributes, "ryz.rank").expect("a rank");
            let all = of_resource.scope_spans.iter().flat_map(|scope| &scope.spans);
            spans.extend(all.map(|span| (rank, span.clone())));
        }
        spans
    }
}

fn value<'a>(attributes: &'a [KeyValue], key: &str) -> Option<&'a Value> {
    attributes.iter().find(|a| a.key == key)?.value.as_ref()?.value.as_ref()
}

fn text(attributes: &[KeyValue], key: &str) -> Option<String> {
    match value(attributes, key)? {
        Value::StringValue(text) => Some(text.clone()),
        _ => None,
    }
}

fn number(attributes: &[KeyValue], key: &str) -> Option<i64> {
    match value(attributes, key)? {
        Value::IntValue(number) => Some(*number),
        _ => None,
    }
}

/// Two ranks generate four tokens.
fn generate(environment: &[(&str, &str)]) -> Output {
    let model = folder("llama-mha");
    let mut arguments = vec!["generate", "--model", model.to_str().expect("a path"), "--token-ids", "1,2,3"];
    arguments.extend(["--max-new-tokens", "4", "--ignore-end", "-n", "2", "--backend", "tcp"]);
    let environment = [&[("RYZ_JOB__NAME", "spanned")], environment].concat();
    Run::new(&arguments, &environment).finish()
}

fn succeeded(output: &Output) {
    assert!(output.status.success(), "{output:?}");
    let line: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(line["token_ids"].as_array().map(Vec::len), Some(4));
}

#[test]
fn a_collector_gets_the_phases_of_every_rank_with_job_epoch_and_rank_and_no_collective() {
    let collector = Collector::start();
    succeeded(&generate(&[("OTEL_EXPORTER_OTLP_ENDPOINT", &collector.url())]));
    let spans = collector.spans();
    for rank in [0, 1] {
        let own: Vec<&Span> = spans.iter().filter(|(of, _)| *of == rank).map(|(_, span)| span).collect();
        let names: BTreeSet<&str> = own.iter().map(|span| span.name.as_str()).collect();
        let expected = [
            "connect",
            "decode",
            "generate",
            "job",
            "leave",
            "load_model",
            "make_group",
            "prefill",
            "probe",
            "rendezvous",
            "self_check",
            "start",
        ];
        assert_eq!(names, expected.into(), "rank {rank}");
        let count = |name: &str| own.iter().filter(|span| span.name == name).count();
        assert_eq!((count("job"), count("prefill"), count("decode")), (1, 1, 3), "rank {rank}");
        let job = own.iter().find(|span| span.name == "job").expect("there");
        assert!(own.iter().all(|span| span.trace_id == job.trace_id), "one trace: {own:?}");
        let parent = |name: &str| {
            let child = own.iter().find(|span| span.name == name).expect("there");
            own.iter().find(|span| span.span_id == child.parent_span_id).map(|span| span.name.as_str())
        };
        for (child, expected) in [
            ("job", None),
            ("start", Some("job")),
            ("self_check", Some("make_group")),
            ("decode", Some("generate")),
        ] {
            assert_eq!(parent(child), expected, "{child}");
        }
    }
}

#[test]
fn at_level_debug_the_setting_sends_collectives_too() {
    let collector = Collector::start();
    // The setting comes before the variable.
    succeeded(&generate(&[
        ("RYZ_OTLP__ENDPOINT", &collector.url()),
        ("RYZ_OTLP__LEVEL", "debug"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1"),
    ]));
    let spans = collector.spans();
    let reduced = |(rank, span): &&OfRank| {
        *rank == 1
            && span.name == "collective"
            && text(&span.attributes, "op").as_deref() == Some("all_reduce")
            && text(&span.attributes, "group").as_deref() == Some("world")
    };
    assert!(spans.iter().filter(reduced).count() > 4, "{spans:?}");
}

#[test]
fn a_collector_that_is_not_there_or_never_answers_changes_nothing() {
    succeeded(&generate(&[("RYZ_OTLP__ENDPOINT", "http://127.0.0.1:1")]));
    // Connections wait in its queue for ever.
    let silent = TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = format!("http://{}", silent.local_addr().expect("an address"));
    succeeded(&generate(&[("RYZ_OTLP__ENDPOINT", &url)]));
}

#[test]
fn an_endpoint_that_cannot_be_used_is_a_wrong_setting() {
    for endpoint in [
        "https://127.0.0.1:4317",
        "no url",
        "ftp://x",
        "unix:///tmp/x",
        "http://127.0.0.1:99999",
        "http://127.0.0.1:0",
        "http://:4317",
    ] {
        let output = generate(&[("RYZ_OTLP__ENDPOINT", endpoint)]);
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{told}");
        assert!(told.contains("otlp.endpoint") && told.contains(endpoint), "{told}");
    }
}

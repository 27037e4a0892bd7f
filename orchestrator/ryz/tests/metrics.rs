//! Metrics: what a job exports, what the table in the code says, the page of the book and the dashboard agree.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use ryzanstein_config::{BackendChoice, Config, MetricsConfig, RendezvousConfig, SecurityConfig};
use ryzanstein_orchestrator::metric_names;
use ryzanstein_orchestrator::rendezvous::{Server, listen};
use ryzanstein_orchestrator::telemetry::{self, Origin};
use ryzanstein_process_group::security::Security;
use ryzanstein_process_group::{Epoch, Error, MemoryRendezvous, ProcessGroupManager, Rank, ReduceOp, Secret};

const PAGE: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/src/metrics.md"));
const DASHBOARD: &str =
    include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/grafana/ryzanstein.json"));
const LONG: Duration = Duration::from_secs(300);

#[test]
fn the_page_lists_every_metric_there_is_and_no_other() {
    let row = |metric: &metric_names::Metric| {
        let labels: Vec<String> = metric.labels.iter().map(|label| format!("`{label}`")).collect();
        let labels = if labels.is_empty() { "–".to_owned() } else { labels.join(", ") };
        format!("| `{}` | {} | {labels} | {} | {} |", metric.name, metric.kind, metric.unit(), metric.meaning)
    };
    let wanted: Vec<String> = metric_names::all().map(row).collect();
    let written: Vec<&str> = PAGE.lines().filter(|line| line.starts_with("| `ryz_")).collect();
    assert_eq!(written, wanted, "docs/src/metrics.md must have these rows:\n{}", wanted.join("\n"));
}

#[test]
fn the_dashboard_is_json_and_asks_only_for_metrics_that_there_are() {
    let dashboard: serde_json::Value = serde_json::from_str(DASHBOARD).expect("JSON");
    let variables: Vec<&str> = dashboard["templating"]["list"]
        .as_array()
        .expect("a list")
        .iter()
        .filter_map(|v| v["name"].as_str())
        .collect();
    assert_eq!(variables, ["datasource", "job", "rank"]);
    let words: BTreeSet<&str> = DASHBOARD
        .split(|c: char| !c.is_ascii_alphanumeric() && c != '_')
        .filter(|word| word.starts_with("ryz_"))
        .collect();
    assert!(words.len() > 8, "{words:?}");
    for word in words {
        let is_known = metric_names::all().any(|metric| {
            let parts: &[&str] = if metric.kind == metric_names::Kind::Histogram {
                &["_bucket", "_sum", "_count"]
            } else {
                &[""]
            };
            parts.iter().any(|part| word == format!("{}{part}", metric.name))
        });
        assert!(is_known, "docs/grafana/ryzanstein.json asks for `{word}`, which no metric is");
    }
}

/// The metrics of a page: type and labels by name.
type Exported = BTreeMap<String, (String, BTreeSet<String>)>;

fn parsed(page: &str) -> Exported {
    let mut exported = Exported::new();
    for line in page.lines() {
        if let Some(words) = line.strip_prefix("# TYPE ") {
            let (name, kind) = words.split_once(' ').expect("a name and a type");
            exported.insert(name.into(), (kind.into(), BTreeSet::new()));
        } else if !line.starts_with('#') && !line.is_empty() {
            let end = line.find(['{', ' ']).expect("a value");
            let of = |name: &str| {
                ["", "_bucket", "_sum", "_count"].iter().any(|part| line[..end] == format!("{name}{part}"))
            };
            let name =
                exported.keys().find(|name| of(name)).unwrap_or_else(|| panic!("no type: {line}")).clone();
            let labels = line[end..].split('"').step_by(2).filter_map(|text| text.strip_suffix('='));
            let labels = labels
                .map(|text| text.trim_start_matches(['{', ',']).to_owned())
                .filter(|label| label != "le");
            exported.get_mut(&name).expect("there").1.extend(labels);
        }
    }
    exported
}

fn scraped(address: SocketAddr) -> Option<String> {
    let mut stream = TcpStream::connect(address).ok()?;
    stream.set_read_timeout(Some(LONG)).ok()?;
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n").ok()?;
    let mut page = String::new();
    stream.read_to_string(&mut page).ok()?;
    Some(page.split_once("\r\n\r\n")?.1.to_owned())
}

/// Scrapes until the page has this text.
fn scraped_with(address: SocketAddr, text: &str) -> String {
    let until = Instant::now() + LONG;
    let mut last = None;
    while Instant::now() < until {
        last = scraped(address);
        if let Some(page) = last.take_if(|page| page.contains(text)) {
            return page;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    panic!("{address} never served `{text}`, but {last:?}")
}

/// Connects with something that is no handshake, and waits until it is hung up on.
fn intrude(address: SocketAddr) {
    let mut stream = TcpStream::connect(address).expect("connected");
    stream.set_read_timeout(Some(LONG)).expect("set");
    stream.write_all(&[7; 512]).expect("written");
    while stream.read(&mut [0; 64]).is_ok_and(|bytes| bytes > 0) {}
}

/// Two ranks: calls, one that waits, an intruder, and a call that differs.
fn job() {
    let mut config = Config::default();
    config.process_group.backend = BackendChoice::Tcp;
    std::thread::scope(|scope| {
        for rendezvous in MemoryRendezvous::new(2) {
            let config = config.clone();
            scope.spawn(move || {
                let mut manager = ProcessGroupManager::initialize(&config, &rendezvous).expect("joined");
                let rank = manager.rank();
                let own = manager.roster().members[rank.index()].data_address.expect("an address");
                let group = manager.world();
                let mut x = [1.0f32; 100];
                for _ in 0..3 {
                    if rank == Rank(1) {
                        std::thread::sleep(Duration::from_millis(100));
                    }
                    group.all_reduce(&mut x, ReduceOp::Sum).expect("reduced");
                }
                intrude(own);
                let count = 10 + rank.index();
                let error = group.all_reduce(&mut x[..count], ReduceOp::Sum).expect_err("the lengths differ");
                assert!(matches!(error, Error::Mismatch { .. } | Error::PeerAborted { .. }), "{error}");
            });
        }
    });
    let listener = listen::bind((Ipv4Addr::LOCALHOST, 0).into()).expect("a port");
    let security = Security::new(&SecurityConfig::default()).expect("settings");
    let server =
        Server::start(listener, Secret::random(), security, 1, Epoch(1), &RendezvousConfig::default());
    intrude(server.expect("a server").address());
}

/// A launcher whose job has been restarted.
struct Launcher(Child);

impl Launcher {
    /// Serves its own metrics at the first address; its rank serves its own at the second.
    fn start([launcher, rank]: [SocketAddr; 2]) -> Self {
        let script =
            "[ $RYZ_EPOCH = 1 ] && exit 1; exec \"$0\" bench --backend tcp --sizes 100MB --iters 1000000";
        let ryz = env!("CARGO_BIN_EXE_ryz");
        let child = Command::new(ryz)
            .args(["launch", "-n", "1", "--max-restarts", "1", "--", "sh", "-c", script, ryz])
            .env("RYZ_METRICS__LAUNCHER_ADDRESS", launcher.to_string())
            .env("RYZ_METRICS__ADDRESS", rank.to_string())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        Self(child.expect("ryz starts"))
    }
}

impl Drop for Launcher {
    fn drop(&mut self) {
        // The supervisor kills its ranks when it loses the launcher.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_job_exports_exactly_the_metrics_in_the_table_with_their_types_and_labels() {
    let free = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").expect("a port"));
    let free = free.map(|listener| listener.local_addr().expect("an address"));
    let launcher = Launcher::start(free);
    let config = MetricsConfig { address: Some(([127, 0, 0, 1], 0).into()), ..MetricsConfig::default() };
    let origin = Origin { job: "test".into(), rank: Some(0), ..Origin::default() };
    let address = telemetry::serve_metrics(&config, &origin, 0).expect("served").expect("an address");
    job();

    let page = scraped(address).expect("a page");
    let mut exported = parsed(&page);
    let of_launcher = parsed(&scraped_with(free[0], "ryz_restarts_total 1"));
    let of_its_rank = parsed(&scraped_with(free[1], "ryz_heartbeats_total{"));
    drop(launcher);
    for (name, (kind, labels)) in of_launcher.into_iter().chain(of_its_rank) {
        exported.entry(name).or_insert((kind, BTreeSet::new())).1.extend(labels);
    }

    for metric in metric_names::all() {
        let Some((kind, labels)) = exported.remove(metric.name) else {
            let needs_gpu = metric_names::OF_GPUS.iter().any(|other| other.name == metric.name);
            assert!(needs_gpu, "{} is not exported:\n{page}", metric.name);
            continue;
        };
        assert_eq!(kind, metric.kind.to_string(), "{}", metric.name);
        let mut expected: BTreeSet<String> = metric.labels.iter().map(ToString::to_string).collect();
        // That of the exporter.
        if labels.contains("rank") {
            expected.insert("rank".into());
        }
        assert_eq!(labels, expected, "{}", metric.name);
    }
    assert!(exported.is_empty(), "not in the table: {exported:?}");

    let class = "ryz_collective_calls_total{rank=\"1\",group=\"world\",op=\"all_reduce\",reduction=\"sum\",dtype=\"f32\",\
                 bytes_up_to=\"1024\",path=\"";
    let calls =
        page.lines().find_map(|line| line.strip_prefix(class)?.split_once("\"} ").map(|(_, calls)| calls));
    assert_eq!(calls, Some("3"), "{page}");
    assert!(
        page.contains("plane=\"data\",reason=\"protocol\"")
            && page.contains("plane=\"control\",reason=\"protocol\""),
        "{page}"
    );
    assert!(page.contains("ryz_groups{rank=\"0\"} 0"), "all groups have ended:\n{page}");
}

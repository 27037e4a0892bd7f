//! Measures the time until a rank that is killed, stopped or stuck is named, by the other ranks and by the launcher.
//!
//! It needs a built `ryz` in the folder of this program. Each run starts a job whose ranks make all-reduces in a tight loop, and
//! signals one rank, another one in each run. After SIGKILL all survivors must name it, and the report must state its signal and a last
//! call. After SIGSTOP they and the launcher must call it unresponsive; in every second run it then continues and nothing fails, in
//! the others the deadline of `--timeout` seconds passes and the report must name it. A rank that is stuck computes and makes
//! no more calls: the launcher must say that it makes no progress, and the same holds.

use std::io::{BufRead as _, BufReader, Read, Write as _};
use std::num::NonZeroUsize;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result, bail, ensure};
use clap::Parser as _;
use rustix::process::{Pid, Signal, kill_process};
use ryzanstein_benches::ranks;
use ryzanstein_orchestrator::{table, telemetry};
use ryzanstein_process_group::ReduceOp;
use serde_json::Value;
use tokio::signal::unix::SignalKind;

/// Upper bound of every wait of a run, except for its deadline.
const PATIENCE: Duration = Duration::from_secs(30);
/// All-reduces before a rank reports that it is ready.
const READY_AFTER: usize = 100;

/// Measures the time until a rank that is killed, stopped or stuck is named
#[derive(clap::Parser)]
struct Options {
    /// What happens to the rank
    #[arg(long, value_enum, default_value_t = Fault::Kill)]
    fault: Fault,
    /// The number of runs
    #[arg(long, default_value_t = 20)]
    runs: usize,
    /// The number of ranks
    #[arg(long, default_value = "4")]
    world_size: NonZeroUsize,
    /// The backend
    #[arg(long, default_value = "auto")]
    backend: String,
    /// The deadline of calls
    #[arg(long, value_name = "SECONDS", default_value_t = 8)]
    timeout: u64,
}

#[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq)]
enum Fault {
    Kill,
    Stop,
    Stuck,
}

impl Fault {
    const fn signal(self) -> Signal {
        match self {
            Self::Kill => Signal::KILL,
            Self::Stop => Signal::STOP,
            Self::Stuck => STICK,
        }
    }

    /// Returns the signal that ends the fault.
    const fn remedy(self) -> Signal {
        match self {
            Self::Kill | Self::Stop => Signal::CONT,
            Self::Stuck => STICK,
        }
    }
}

/// Tells a rank to make no more calls; the second time, to continue.
const STICK: Signal = Signal::USR2;
static IS_STUCK: AtomicBool = AtomicBool::new(false);

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if arguments == ["rank"] {
        return rank();
    }
    let options = Options::parse();
    let mut runs = Vec::new();
    for number in 0..options.runs {
        let victim = number % options.world_size;
        let run = Run::start(&options, victim)?;
        let found = if options.fault == Fault::Kill {
            run.killed()
        } else {
            run.stopped(number % 2 == 1, Duration::from_secs(options.timeout))
        };
        runs.push(found.with_context(|| format!("run {number}, rank {victim}"))?);
    }
    print!("{}", summary(&runs));
    Ok(())
}

/// Makes all-reduces until one fails. Prints when the rank is ready, and the time and the reason of the failure.
fn rank() -> Result<()> {
    let mut orchestrator = ranks::initialize()?;
    let rank = orchestrator.manager().rank();
    let log = ryzanstein_config::LogConfig { level: "warn".into(), ..Default::default() };
    let origin = telemetry::Origin { rank: Some(rank.0), ..Default::default() };
    telemetry::log_to_stderr(&log, &origin)?;
    listen_for_stick()?;
    let mut x = vec![1.0f32; 256];
    for made in 0.. {
        while IS_STUCK.load(Ordering::Relaxed) {
            std::hint::spin_loop();
        }
        if made == READY_AFTER {
            println!("ready {}", std::process::id());
        }
        x.fill(1.0);
        // Lives until the error is reported: freeing it may wait for the GPU.
        let mut there;
        let group = orchestrator.manager().world();
        let outcome = if group.device().is_none() {
            group.all_reduce(&mut x[..], ReduceOp::Sum)
        } else {
            match group.upload(&x) {
                Ok(uploaded) => {
                    there = uploaded;
                    group.all_reduce(&mut there, ReduceOp::Sum)
                }
                Err(error) => Err(error),
            }
        };
        if let Err(error) = outcome {
            println!("error {} {error}", now().as_nanos());
            std::io::stdout().flush()?;
            orchestrator.report(&error);
            std::process::exit(1);
        }
    }
    Ok(())
}

/// Listens for the signal on a separate thread, because the loop is to be stuck.
fn listen_for_stick() -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut signals = {
        let _context = runtime.enter();
        tokio::signal::unix::signal(SignalKind::user_defined2())?
    };
    std::thread::spawn(move || {
        runtime.block_on(async {
            while signals.recv().await.is_some() {
                IS_STUCK.fetch_xor(true, Ordering::Relaxed);
            }
        });
    });
    Ok(())
}

fn now() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// The result of one run.
struct Found {
    /// Milliseconds until the last survivor named the victim; `None` if the survivors did not name it while the job ran.
    survivors_ms: Option<f64>,
    /// Milliseconds until the launcher named the victim; `None` if it did not while the job ran.
    launcher_ms: Option<f64>,
    /// Three checks of the report: it names the victim, its signal if it died, and a last call. `None` for a job that
    /// continued.
    report: Option<[bool; 3]>,
}

/// A job and all its output.
struct Run {
    child: Child,
    lines: Receiver<(Duration, String)>,
    pids: Vec<u32>,
    victim: usize,
    fault: Fault,
    struck: Duration,
}

impl Run {
    /// Starts a job, and causes the fault once all ranks are in the loop.
    fn start(options: &Options, victim: usize) -> Result<Self> {
        let this = std::env::current_exe()?;
        let mut command = Command::new(this.with_file_name("ryz"));
        command.args(["launch", "--format", "json", "--backend", &options.backend]);
        command.args(["--world-size", &options.world_size.to_string()]);
        command.args(["--timeout", &format!("{}s", options.timeout), "--"]).arg(&this).arg("rank");
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .context("`ryz` cannot be started: run `cargo build --release` first")?;
        let (sender, lines) = channel();
        forward(child.stdout.take().context("piped")?, sender.clone());
        forward(child.stderr.take().context("piped")?, sender);
        let pids = vec![0; options.world_size.get()];
        let mut run = Self { child, lines, pids, victim, fault: options.fault, struck: Duration::ZERO };
        let deadline = Instant::now() + PATIENCE;
        while run.pids.contains(&0) {
            let (_, line) = run.next(deadline)?.context("the job ended before its ranks were ready")?;
            if let Some((rank, pid)) =
                line.strip_prefix("[rank ").and_then(|rest| rest.split_once("] ready "))
            {
                run.pids[rank.parse::<usize>()?] = pid.parse()?;
            }
        }
        // In the middle of the loop, at varying positions.
        std::thread::sleep(Duration::from_micros(2000 + 137 * u64::from(run.pids[victim] % 50)));
        run.struck = now();
        run.signal(options.fault.signal())?;
        Ok(run)
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        let pid = i32::try_from(self.pids[self.victim]).ok().and_then(Pid::from_raw).context("a pid")?;
        Ok(kill_process(pid, signal)?)
    }

    /// Returns the next line and the time when it was read; `None` at the end of the output.
    fn next(&self, deadline: Instant) -> Result<Option<(Duration, String)>> {
        match self.lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(line) => Ok(Some(line)),
            Err(RecvTimeoutError::Disconnected) => Ok(None),
            Err(RecvTimeoutError::Timeout) => bail!("nothing was written in time"),
        }
    }

    fn since(&self, at: Duration) -> f64 {
        at.saturating_sub(self.struck).as_secs_f64() * 1e3
    }

    /// Returns the survivor that wrote this line, and the rest of the line.
    fn survivor<'l>(&self, line: &'l str) -> Option<(usize, &'l str)> {
        let (rank, rest) = line.strip_prefix("[rank ")?.split_once("] ")?;
        let rank = rank.parse().ok()?;
        (rank != self.victim).then_some((rank, rest))
    }

    fn killed(self) -> Result<Found> {
        let deadline = Instant::now() + PATIENCE;
        let (mut told, mut report) = (vec![None; self.pids.len()], None);
        let name = format!("rank {} (host", self.victim);
        let pid = format!("pid {}", self.pids[self.victim]);
        while let Some((_, line)) = self.next(deadline)? {
            if let Some((rank, said)) = self.survivor(&line)
                && let Some((at, error)) = said.strip_prefix("error ").and_then(|rest| rest.split_once(' '))
            {
                ensure!(error.contains(&name) && error.contains(&pid), "rank {rank} blames another: {error}");
                told[rank] = Some(self.since(Duration::from_nanos(at.parse()?)));
            }
            report = serde_json::from_str(&line).ok().or(report);
        }
        let mut survivors_ms = 0.0;
        for (rank, at) in told.into_iter().enumerate().filter(|(rank, _)| *rank != self.victim) {
            survivors_ms = f64::max(survivors_ms, at.with_context(|| format!("rank {rank} says nothing"))?);
        }
        Ok(Found { survivors_ms: Some(survivors_ms), launcher_ms: None, report: Some(self.judge(report)?) })
    }

    fn stopped(mut self, continues: bool, timeout: Duration) -> Result<Found> {
        let mut deadline = Instant::now() + PATIENCE;
        let (mut told, mut launcher_ms, mut report) = (vec![None; self.pids.len()], None, None);
        let is_stuck = self.fault == Fault::Stuck;
        let named = if is_stuck {
            [format!("rank {} makes no progress", self.victim), String::new()]
        } else {
            [format!("rank {} (host", self.victim), "is unresponsive".into()]
        };
        while let Some((at, line)) = self.next(deadline)? {
            if named.iter().all(|part| line.contains(part)) {
                let ms = self.since(at);
                match self.survivor(&line) {
                    Some((rank, _)) => drop(told[rank].get_or_insert(ms)),
                    None => drop(launcher_ms.get_or_insert(ms)),
                }
            }
            let all_told =
                is_stuck || told.iter().filter(|told| told.is_some()).count() == self.pids.len() - 1;
            if all_told && launcher_ms.is_some() && continues {
                self.signal(self.fault.remedy())?;
                // No rank may give up, although the deadline of the call passes meanwhile.
                let calm = Instant::now() + timeout;
                while let Ok((_, line)) =
                    self.lines.recv_timeout(calm.saturating_duration_since(Instant::now()))
                {
                    ensure!(!line.contains("] error "), "it fails though the rank has continued: {line}");
                }
                let pid = Pid::from_child(&self.child);
                kill_process(pid, Signal::TERM)?;
                deadline = Instant::now() + PATIENCE;
                while self.next(deadline)?.is_some() {}
                self.child.wait()?;
                report = None;
                break;
            }
            report = serde_json::from_str(&line).ok().or(report);
        }
        ensure!(launcher_ms.is_some(), "the launcher says nothing");
        let mut survivors_ms = None;
        for (rank, at) in told.iter().enumerate().filter(|(rank, _)| !is_stuck && *rank != self.victim) {
            let at = at.with_context(|| format!("rank {rank} says nothing"))?;
            survivors_ms = Some(f64::max(at, survivors_ms.unwrap_or(0.0)));
        }
        let report = if continues { None } else { Some(self.judge(report)?) };
        Ok(Found { survivors_ms, launcher_ms, report })
    }

    fn judge(&self, report: Option<Value>) -> Result<[bool; 3]> {
        let first = &report.context("no report")?["first_failure"];
        let victim = first["rank"] == self.victim && first["pid"] == self.pids[self.victim];
        Ok([victim, first["signal"] == 9, first["last_call"].is_string()])
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        let _ = self.signal(self.fault.remedy());
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Sends the lines with the time at which each was read.
fn forward(stream: impl Read + Send + 'static, to: Sender<(Duration, String)>) {
    std::thread::spawn(move || {
        for line in BufReader::new(stream).lines().map_while(Result::ok) {
            let _ = to.send((now(), line));
        }
    });
}

fn summary(runs: &[Found]) -> String {
    let quantiles = |mut all: Vec<f64>| {
        all.sort_by(f64::total_cmp);
        let at = |share: f64| all[((all.len() - 1) as f64 * share).ceil() as usize];
        vec![format!("{:.0} ms", at(0.5)), format!("{:.0} ms", at(0.99)), format!("{:.0} ms", at(1.0))]
    };
    let survivors = runs.iter().filter_map(|run| run.survivors_ms).collect();
    let launcher = runs.iter().filter_map(|run| run.launcher_ms).collect();
    let mut rows = Vec::new();
    for (who, times) in [("all survivors", survivors), ("the launcher", launcher)] {
        if !Vec::is_empty(&times) {
            rows.push([vec![who.to_owned()], quantiles(times)].concat());
        }
    }
    let reports: Vec<[bool; 3]> = runs.iter().filter_map(|run| run.report).collect();
    let right = |which: usize| reports.iter().filter(|report| report[which]).count();
    format!(
        "{} runs; the right rank is named in all of them\n{}report: right rank {} of {n}, its signal {} of \
         {n}, last call {} of {n}\n",
        runs.len(),
        table::columns(&["named by", "median", "p99", "longest"], 0, &rows),
        right(0),
        right(1),
        right(2),
        n = reports.len()
    )
}

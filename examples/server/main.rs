//! A server with the OpenAI API on a tensor-parallel model: how an engine embeds the crates.
//!
//! ```console
//! $ cargo build --release -p ryzanstein-examples --example server
//! $ target/release/examples/server --model DIR
//! $ target/release/ryz launch -n 2 -- target/release/examples/server --model DIR --listen 127.0.0.1:8000
//! ```
//!
//! Each rank is a process. `http` runs on rank 0 alone, on a thread of its own; `engine` computes on the main thread of
//! every rank; `api` is the format of requests and answers. It has no encryption and asks for no key: put it behind a proxy.

mod api;
mod engine;
mod http;

use std::io::IsTerminal as _;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::thread;

use anyhow::{Context as _, Result, ensure};
use clap::Parser as _;
use ryzanstein_orchestrator::{Orchestrator, hub, rendezvous};
use ryzanstein_process_group::Rank;
use ryzanstein_tensor_parallel::{CacheSize, ChatError, ChatTemplate, Error, Llama, Passes, Tokenizer};
use tokio::sync::watch;

use crate::engine::Leader;
use crate::http::{App, StopSignals};

/// Serves a model with the OpenAI API.
#[derive(clap::Parser, Debug)]
struct Args {
    /// Folder of the model in Hugging Face format, with a tokenizer.json; or its name, org/name or org/name@revision, if the
    /// Hugging Face cache has it
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
    /// Address of rank 0's HTTP server
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:8000")]
    listen: SocketAddr,
    /// Sequences that are computed together
    #[arg(long, value_name = "N", default_value = "8", value_parser = clap::value_parser!(u16).range(1..))]
    sequences: u16,
    /// Requests that may wait for a sequence to end; more are refused with status 429
    #[arg(long, value_name = "N", default_value = "64", value_parser = clap::value_parser!(u16).range(1..))]
    queue: u16,
    /// Positions of a sequence: tokens of the prompt and the answer [default: the model's, at most 2048]
    #[arg(long, value_name = "N")]
    context: Option<usize>,
    /// Positions of all sequences together for which the KV cache has memory [default: all sequences at full length]
    #[arg(long, value_name = "N")]
    positions: Option<usize>,
    /// Passes between two looks at new requests, while all sequences take their most likely token [default: 8 on GPUs, 1 on
    /// CPUs and with pipeline stages]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    passes: Option<u16>,
}

fn main() -> Result<()> {
    let args = Args::parse();
    let colours = std::io::stderr().is_terminal();
    tracing_subscriber::fmt().with_writer(std::io::stderr).with_target(false).with_ansi(colours).init();
    let mut orchestrator = Orchestrator::builder().initialize()?;
    match rank(&args, &mut orchestrator) {
        Ok(()) => Ok(orchestrator.finalize()?),
        Err(error) => {
            orchestrator.report(error.as_ref());
            Err(error)
        }
    }
}

/// Runs one rank between joining the job and leaving it.
fn rank(args: &Args, orchestrator: &mut Orchestrator) -> Result<()> {
    let (timeout, grace) = {
        let config = orchestrator.config();
        (config.process_group.timeout.get(), config.launch.grace)
    };
    let ranks = orchestrator.manager().world().world_size();
    let is_first = orchestrator.manager().rank() == Rank(0);
    // Before the model is loaded, so that an address that is taken is found at once. Early clients wait.
    let listener = is_first.then(|| TcpListener::bind(args.listen)).transpose();
    let listener =
        listener.with_context(|| format!("cannot listen on {}; choose another --listen", args.listen))?;
    let folder = hub::resolve(&args.model, &rendezvous::process_environment())?;
    let model = Arc::new(orchestrator.load_model(&folder, None)?);
    let manager = orchestrator.manager();
    let replicas = manager.data_parallel().world_size();
    ensure!(
        replicas == 1,
        "layout.data_parallel = {replicas}: this server runs one model on all ranks; set it to 1"
    );
    let context = args.context.unwrap_or(model.config().max_positions.min(2048));
    let mut size = CacheSize::full(args.sequences.into(), context);
    if let Some(positions) = args.positions {
        ensure!(
            positions >= context,
            "--positions {positions} is less than one sequence needs; set it to {context} or more"
        );
        size = size.with_positions(positions);
    }
    let mut decoder = model.decoder(size, Passes::Graph)?;

    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    // On every rank: a launcher signals all of them, and they leave together when the first says so.
    let signals = runtime.block_on(async { StopSignals::catch() })?;
    let Some(listener) = listener else {
        return Ok(engine::follow(&mut decoder, manager)?);
    };

    let (queue, requests) = mpsc::sync_channel(args.queue.into());
    let app = app(name(&args.model, &folder)?, &folder, &model, context, queue)?;
    let tokenizer = Arc::clone(&app.tokenizer);
    // The launcher kills what still runs after its grace; leaving takes a moment too.
    let drain = grace * 3 / 4;
    eprintln!("listening on http://{}, model {}, {ranks} ranks", listener.local_addr()?, app.model);
    let (engine, runs) = watch::channel(());
    let http = thread::spawn(move || runtime.block_on(http::serve(listener, app, signals, runs, drain)));
    let end_tokens = model.config().eos_tokens.clone();
    let passes = args.passes.unwrap_or(if decoder.is_asynchronous() { 8 } else { 1 });
    let leader = Leader::new(&tokenizer, end_tokens, requests, (size, passes.into()), timeout);
    let outcome = leader.lead(&mut decoder, manager);
    // After a failure too, clients get their last event before this process ends.
    drop(engine);
    let served = http.join().map_err(|_| anyhow::anyhow!("the HTTP thread panicked"));
    outcome?;
    Ok(served??)
}

/// Returns the model's name for clients: that in the Hugging Face cache, or that of its folder.
fn name(given: &Path, folder: &Path) -> Result<String> {
    let name = if given == folder {
        folder.canonicalize()?.file_name().map(|name| name.to_string_lossy().into_owned())
    } else {
        Some(given.display().to_string())
    };
    name.context("--model: a folder without a name")
}

fn app(
    name: String,
    folder: &Path,
    model: &Llama,
    context: usize,
    queue: mpsc::SyncSender<engine::Job>,
) -> Result<App> {
    let tokenizer = Tokenizer::open(folder)?.with_context(|| {
        format!("{} has no tokenizer.json, which a server of texts needs", folder.display())
    })?;
    let template = match ChatTemplate::open(folder) {
        Ok(template) => Some(template),
        Err(Error::Chat(ChatError::NoTemplate(_))) => None,
        Err(error) => return Err(error.into()),
    };
    Ok(App {
        model: name,
        tokenizer: Arc::new(tokenizer),
        template,
        vocabulary: model.config().vocabulary,
        stop_strings: model.config().stop_strings.clone(),
        context,
        queue,
    })
}

//! Chat templates, rendered in a process of their own. A template is a program that came with a model. The limits of the process
//! end it if it takes too much memory or time, or nests too deeply.

use std::io::{Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus, Stdio};

use rustix::process::{Resource, Rlimit, Signal, getrlimit, setrlimit};
use ryzanstein_config::ByteSize;
use ryzanstein_tensor_parallel::{ChatError, ChatTemplate, ChatTime, Error, Message};
use serde::{Deserialize, Serialize};

/// The name of the hidden command that renders.
pub(crate) const NAME: &str = "__render";

/// Limit of the addresses of the process, far above the needs of a template.
const MOST_MEMORY: ByteSize = ByteSize::mib(1024);
/// Addresses for each byte of the request, which is copied several times.
const MEMORY_PER_BYTE: u64 = 16;
/// Limit of the processor time in seconds.
const MOST_SECONDS: u64 = 10;
/// Seconds in addition for each MiB of the request.
const SECONDS_PER_MIB: u64 = 5;

#[derive(Serialize, Deserialize)]
struct Request {
    template: ChatTemplate,
    messages: Vec<Message>,
    now: ChatTime,
}

/// Returns the limits for a request of this size: memory and seconds.
fn limits(request: u64) -> (ByteSize, u64) {
    let mib = request >> 20;
    let memory = MOST_MEMORY.get().saturating_add((mib << 20).saturating_mul(MEMORY_PER_BYTE));
    (ByteSize::bytes(memory), MOST_SECONDS + mib * SECONDS_PER_MIB)
}

/// Renders messages with the template of a model, at the current time.
///
/// # Errors
/// Returns the error of the template, or the limit that it exceeds.
pub(crate) fn render(template: &ChatTemplate, messages: &[Message]) -> Result<String, Error> {
    let file = template.file().to_owned();
    let request = Request { template: template.clone(), messages: messages.to_vec(), now: ChatTime::now() };
    let rendered = serde_json::to_vec(&request).map_err(|error| error.to_string()).and_then(|request| {
        let (status, output, errors) =
            run(&request).map_err(|e| format!("cannot start a process for it: {e}"))?;
        // The end of the process may have cut its answer short.
        let answer = serde_json::from_slice(&output).ok().filter(|_| status.success());
        answer.unwrap_or_else(|| Err(reason(status, &errors, request.len() as u64)))
    });
    rendered.map_err(|reason| ChatError::Template { file, reason }.into())
}

/// Gives a request to a new process. Returns its status and what it wrote on standard output and standard error.
fn run(request: &[u8]) -> std::io::Result<(ExitStatus, Vec<u8>, String)> {
    let mut command = Command::new("/proc/self/exe");
    command.arg(NAME).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut process = command.spawn()?;
    if let Some(mut stdin) = process.stdin.take() {
        // A process that ended early says why.
        let _ = stdin.write_all(request);
    }
    let output = process.wait_with_output()?;
    Ok((output.status, output.stdout, String::from_utf8_lossy(&output.stderr).into_owned()))
}

/// Returns why the process ended without an answer.
fn reason(status: ExitStatus, errors: &str, request: u64) -> String {
    let (memory, seconds) = limits(request);
    if errors.contains("memory allocation of") || errors.contains("cannot allocate memory") {
        format!("it takes more than {memory} of memory")
    } else if status.signal() == Some(Signal::XCPU.as_raw()) {
        format!("it takes more than {seconds} s of processor time")
    } else if errors.contains("overflowed its stack") || status.signal() == Some(Signal::SEGV.as_raw()) {
        "it nests values, expressions or blocks too deeply".into()
    } else {
        format!("the process that renders it ended with {status}: {}", errors.trim())
    }
}

/// Answers one request, from standard input to standard output, within its limits.
pub(crate) fn serve() -> anyhow::Result<i32> {
    let mut request = Vec::new();
    std::io::stdin().read_to_end(&mut request)?;
    let (memory, seconds) = limits(request.len() as u64);
    // A lower limit that this process already has stays.
    let limit = |resource, most: u64| {
        let maximum = getrlimit(resource).maximum;
        setrlimit(
            resource,
            Rlimit { current: Some(maximum.map_or(most, |maximum| most.min(maximum))), maximum },
        )
    };
    limit(Resource::Core, 0)?;
    limit(Resource::As, memory.get())?;
    limit(Resource::Cpu, seconds)?;
    let Request { template, messages, now } = serde_json::from_slice(&request)?;
    let rendered = template.render(&messages, now).map_err(|error| match error {
        ChatError::Template { reason, .. } => reason,
        other => other.to_string(),
    });
    std::io::stdout().lock().write_all(&serde_json::to_vec(&rendered)?)?;
    Ok(0)
}

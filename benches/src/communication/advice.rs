//! Advice where communication takes a large share of a step, chosen by the bound of the calls and by where they run.

use ryzanstein_process_group::units;

use super::{ADVISED_FROM, Communication, Part, percent, short};
use ryzanstein_orchestrator::plural;

/// Calls of fewer bytes than this are taken to be bound by latency if the bandwidth of a link is not known.
const SMALL: f64 = 262_144.0;

/// The context of the calls.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct JobContext {
    /// Number of ranks of the group.
    pub ranks: usize,
    /// Number of ranks that share this rank's CPUs, itself included.
    pub sharing_cpus: usize,
    /// Number of hosts of the ranks.
    pub hosts: usize,
    /// True if the ranks compute on GPUs.
    pub on_gpus: bool,
    /// True if the driver reports NVLinks.
    pub has_nvlink: bool,
    /// Bandwidth of one link in one direction, in 10⁹ bytes per second, if known.
    pub link_gbs: Option<f64>,
    /// True if steps are replayed from CUDA graphs where possible.
    pub is_graph: bool,
}

/// The dominant part of a call's time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Limit {
    /// Starting the call, its steps, and waiting for other ranks.
    Latency,
    /// Moving the bytes of the call.
    Bandwidth,
}

impl Limit {
    /// Returns the limit of a call. Bandwidth limits it if its bytes take at least half of its time on the link, or, where no
    /// link is known, are many.
    fn of(part: &Part, link_gbs: Option<f64>) -> Self {
        let is_bandwidth = match (link_gbs, part.call_us) {
            (Some(gbs), Some(us)) => part.wire_bytes / (gbs * 1e3) >= us / 2.0,
            _ => part.bytes >= SMALL,
        };
        if is_bandwidth { Self::Bandwidth } else { Self::Latency }
    }
}

/// The reason for the large share of communication in a step, and the remedies.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Advice {
    /// A sentence that names the most expensive operation and its limit.
    pub cause: String,
    /// Remedies, in sentences, the most effective first.
    pub remedies: Vec<String>,
}

impl Advice {
    /// Returns all sentences.
    pub(super) fn lines(self) -> impl Iterator<Item = String> {
        std::iter::once(self.cause).chain(self.remedies)
    }
}

impl Communication {
    /// Returns advice; `None` if communication takes a small share.
    pub fn advice(&self, context: &JobContext) -> Option<Advice> {
        self.share().filter(|share| *share >= ADVISED_FROM)?;
        let part = self.parts.first()?;
        let limit = Limit::of(part, context.link_gbs);
        let mut all = Vec::new();
        if context.hosts > 1 {
            all.push(format!(
                "The group spans {}. Let the ranks of a host share layers, and divide the layers between hosts: \
                 --pipeline-parallel {}.",
                plural(context.hosts, "host"),
                context.hosts
            ));
        }
        all.extend(match limit {
            Limit::Latency => against_latency(context),
            Limit::Bandwidth => against_bandwidth(part, context),
        });
        if !context.on_gpus && context.sharing_cpus == context.ranks {
            all.push(
                "Ranks of one host share its processors, so more ranks add no arithmetic: use as few as the memory allows."
                    .into(),
            );
        } else if context.ranks > 2 {
            all.push(format!(
                "Use fewer ranks, such as {}, if the model fits: each computes more, and calls are quicker.",
                context.ranks / 2
            ));
        }
        Some(Advice { cause: cause(part, limit, context.link_gbs), remedies: all })
    }
}

fn cause(part: &Part, limit: Limit, link_gbs: Option<f64>) -> String {
    let Part { op, calls, bytes, .. } = part;
    let calls = if short(*calls) == "1" { "1 call".into() } else { format!("{} calls", short(*calls)) };
    let call = part.call_us.map_or_else(String::new, |us| format!(" and {}", units::time(us)));
    let on_link = link_gbs.map_or_else(String::new, |gbs| {
        format!(", of which the bytes need {}", units::time(part.wire_bytes / (gbs * 1e3)))
    });
    format!(
        "{op} takes {} of a step, bound by {}: {calls} of {}{call}{on_link}.",
        percent(part.share.unwrap_or(0.0)),
        match limit {
            Limit::Latency => "latency",
            Limit::Bandwidth => "bandwidth",
        },
        units::bytes(*bytes),
    )
}

fn against_latency(context: &JobContext) -> Vec<String> {
    let mut all = vec!["Decode more sequences in each pass: the number of calls stays the same.".to_owned()];
    if context.on_gpus && !context.is_graph {
        all.push("Replay passes from CUDA graphs: leave --no-graph out.".into());
    }
    if context.on_gpus {
        all.push(
            "In layers of your own, call `all_reduce_add_norm`: sum, residual and norm in one kernel.".into(),
        );
    }
    all
}

fn against_bandwidth(part: &Part, context: &JobContext) -> Vec<String> {
    let mut all = Vec::new();
    if context.on_gpus && !context.has_nvlink {
        all.push(
            "No NVLink is known between these GPUs: `ryz topo` shows what joins them. NVLink carries several times what PCI \
             Express does."
                .to_owned(),
        );
    }
    if part.dtype == "f32" && part.op == "all_reduce" {
        all.push("Compute with 16-bit activations, which are half the bytes: --dtype bf16.".into());
    }
    all.push(
        "In layers of your own, overlap: start `all_reduce_async` for one half of the tokens, and compute the other half."
            .into(),
    );
    all
}

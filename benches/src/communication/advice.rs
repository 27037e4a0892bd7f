//! What to do where communication takes much of a step: chosen by what the calls are bound by, and where they run.

use ryzanstein_process_group::units;

use super::{ADVISED_FROM, Communication, Part, percent, short};
use ryzanstein_orchestrator::plural;

/// Where the bandwidth of a link is not known, calls of fewer bytes than this are taken to be bound by latency.
const SMALL: f64 = 262_144.0;

/// Where the calls run.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct JobContext {
    /// Ranks of the group.
    pub ranks: usize,
    /// How many of them share this rank's CPUs, itself included.
    pub sharing_cpus: usize,
    /// Hosts that they run on.
    pub hosts: usize,
    /// Whether they compute on GPUs.
    pub on_gpus: bool,
    /// Whether the driver knows of NVLinks.
    pub has_nvlink: bool,
    /// What one link carries in one direction, in 10⁹ bytes per second, if known.
    pub link_gbs: Option<f64>,
    /// Whether steps are replayed from CUDA graphs where they can be.
    pub is_graph: bool,
}

/// What most of a call's time goes into.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Limit {
    /// Starting it, its steps, and waiting for other ranks.
    Latency,
    /// Moving its bytes.
    Bandwidth,
}

impl Limit {
    /// Of a call: its bytes take at least half of its time on the link, or, where no link is known, are many.
    fn of(part: &Part, link_gbs: Option<f64>) -> Self {
        let is_bandwidth = match (link_gbs, part.call_us) {
            (Some(gbs), Some(us)) => part.wire_bytes / (gbs * 1e3) >= us / 2.0,
            _ => part.bytes >= SMALL,
        };
        if is_bandwidth { Self::Bandwidth } else { Self::Latency }
    }
}

/// Why communication takes so much of a step, and what to do.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Advice {
    /// The operation that takes most, and what bounds it, in a sentence.
    pub cause: String,
    /// What to do, in sentences, the most effective first.
    pub remedies: Vec<String>,
}

impl Advice {
    /// All sentences.
    pub(super) fn lines(self) -> impl Iterator<Item = String> {
        std::iter::once(self.cause).chain(self.remedies)
    }
}

impl Communication {
    /// `None` where communication takes little.
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

//! A plan as a table and as JSON.

use ryzanstein_process_group::units::bytes;

use super::{Plan, Size};
use ryzanstein_orchestrator::plural;
use ryzanstein_orchestrator::table::{Cell, Column, Screen, Tone, table, wrap};

const COLUMNS: [Column<'static>; 11] = [
    Column::right("ranks"),
    Column::left("fits"),
    Column::right("weights"),
    Column::right("KV cache"),
    Column::right("KV copies").drop_priority(5),
    Column::right("workspace").drop_priority(2),
    Column::right("groups").drop_priority(3),
    Column::right("total"),
    Column::right("reduced/token").drop_priority(4),
    Column::right("comm."),
    Column::right("longest").drop_priority(1),
];

impl Plan {
    /// Formats a table with the reasons below it.
    pub fn table(&self, screen: Screen) -> String {
        let rows: Vec<Vec<Cell>> = self.sizes.iter().map(cells).collect();
        let mut lines = vec![self.heading(), self.memory(), String::new()];
        lines.push(table(&COLUMNS, &rows, screen));
        lines.extend(self.reasons());
        lines.push(format!(
            "comm.: predicted share of a decode step that communicates over {}. longest: the longest context that fits.",
            self.interconnect
        ));
        lines
            .iter()
            .map(|line| if line.contains('\n') { line.clone() } else { wrap(line, 2, screen) } + "\n")
            .collect()
    }

    fn heading(&self) -> String {
        format!(
            "{}: {} parameters, {}, {} of {}",
            self.model,
            count(self.parameters),
            self.dtype,
            plural(self.batch, "sequence"),
            plural(self.context, "position")
        )
    }

    fn memory(&self) -> String {
        match (self.memory_bytes, self.budget_bytes) {
            (Some(memory), Some(budget)) => format!(
                "a GPU has {}, of which a rank may allocate {} (device.memory_fraction)",
                bytes(memory as f64),
                bytes(budget as f64)
            ),
            _ => "the GPUs' memory is not known: pass --memory SIZE to learn what fits".into(),
        }
    }

    /// Returns the reasons why some world sizes are not legal: one line for each.
    fn reasons(&self) -> Vec<String> {
        let illegal = self.sizes.iter().filter_map(|size| Some((size.world_size, size.why.as_deref()?)));
        illegal.map(|(ranks, why)| format!("{}: {why}", plural(ranks, "rank"))).collect()
    }
}

/// Formats a large number in words.
fn count(number: u64) -> String {
    match number as f64 {
        n if n >= 1e9 => format!("{:.2} billion", n / 1e9),
        n if n >= 1e6 => format!("{:.2} million", n / 1e6),
        _ => number.to_string(),
    }
}

fn cells(size: &Size) -> Vec<Cell> {
    let none = || Cell::from("-");
    let shown = |figure: Option<u64>| figure.map_or_else(none, |n| bytes(n as f64).into());
    let fits = match (size.legal, size.fits) {
        (false, _) => Cell::new("illegal", Tone::Bad),
        (true, Some(true)) => Cell::new("yes", Tone::Good),
        (true, Some(false)) => Cell::new("no", Tone::Warning),
        (true, None) => "?".into(),
    };
    vec![
        size.world_size.to_string().into(),
        fits,
        shown(size.weights_bytes),
        shown(size.kv_cache_bytes),
        size.kv_replication.map_or_else(none, |n| n.to_string().into()),
        shown(size.workspace_bytes),
        shown(size.nccl_bytes.zip(size.shared_bytes).map(|(nccl, shared)| nccl + shared)),
        shown(size.total_bytes),
        shown(size.all_reduce_bytes_per_token),
        size.communication_share.map_or_else(none, |share| format!("{:.1} %", share * 100.0).into()),
        size.max_context.map_or_else(none, |n| n.to_string().into()),
    ]
}

//! A topology as a table.

use super::{Device, Topology, name};
use ryzanstein_orchestrator::table::{Cell, Column, Screen, Tone, table, wrap};
use ryzanstein_process_group::nvml::PairPath;

impl Topology {
    /// Formats the matrix, then the meanings of its names, the descriptions of the devices, and the advice on tensor
    /// parallelism.
    pub fn table(&self, screen: Screen) -> String {
        let mut text = format!("{}\n\n", self.heading());
        let columns = self.columns();
        if !columns.is_empty() {
            let heads = columns.iter().map(|index| Column::left(&self.devices[*index].name));
            let heads: Vec<Column<'_>> = [Column::left("")]
                .into_iter()
                .chain(heads)
                .chain([Column::left("NUMA"), Column::left("CPUs").drop_priority(1)])
                .collect();
            let rows: Vec<Vec<Cell>> = self
                .devices
                .iter()
                .zip(&self.matrix)
                .map(|(device, ways)| {
                    let ways = columns.iter().map(|column| cell(ways[*column]));
                    [Cell::new(device.name.as_str(), Tone::Strong)]
                        .into_iter()
                        .chain(ways)
                        .chain(near(device))
                        .collect()
                })
                .collect();
            text += &table(&heads, &rows, screen);
            text.push('\n');
        }
        for line in self.notes() {
            text += &wrap(&line, 6, screen);
            text.push('\n');
        }
        text
    }

    /// Returns the notes below the matrix.
    pub(super) fn notes(&self) -> Vec<String> {
        let legend = self.legend().into_iter().map(|(name, meaning)| format!("{name:<4}  {meaning}"));
        let mut notes: Vec<String> = legend.collect();
        let devices = self.devices.iter().map(|device| {
            let pci = device.pci.as_deref().map_or_else(String::new, |pci| format!(", {pci}"));
            format!("{:<4}  {}{pci}", device.name, device.description)
        });
        if !notes.is_empty() {
            notes.push(String::new());
        }
        notes.extend(devices);
        if !self.devices.is_empty() {
            notes.push(String::new());
        }
        let nodes =
            self.numa_nodes.iter().map(|node| format!("NUMA node {}: CPUs {}", node.id, node.processors));
        notes.extend(nodes);
        notes.extend(self.no_gpus.as_ref().map(|why| format!("no GPUs: {why}")));
        notes.extend(self.tensor_parallel.as_ref().map(|advice| format!("tensor parallelism: {advice}")));
        notes
    }
}

fn cell(way: Option<PairPath>) -> Cell {
    let tone = match way {
        None => Tone::Faint,
        Some(PairPath::Nvlink(_)) => Tone::Good,
        Some(PairPath::System) => Tone::Warning,
        Some(_) => Tone::Plain,
    };
    Cell::new(name(way), tone)
}

fn near(device: &Device) -> [Cell; 2] {
    let node = device.numa_node.map_or_else(|| "-".into(), |node| node.to_string());
    [node.into(), device.processors.as_deref().unwrap_or("-").into()]
}

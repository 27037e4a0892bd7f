//! A topology as an SVG that stands alone, light or dark like its reader's system.

use std::fmt::Write as _;

use ryzanstein_process_group::nvml::PairPath;

use super::{Topology, Way};
use crate::drawing::{escape, text_width};
use crate::table::{Screen, wrap};

/// In units of the drawing, one of which is a pixel at the least width that it is read at: 400.
const FONT: f64 = 12.0;
const MARGIN: f64 = 10.0;
const CELL: (f64, f64) = (40.0, 24.0);
const LINE: f64 = 17.0;
/// Narrower drawings would have to break their notes too often.
const LEAST_WIDTH: f64 = 400.0;

const STYLE: &str = "
:root { color-scheme: light dark; width: 100%; max-width: 900px; height: auto; --back: #fff; --ink: #1d2129; --best: #2e9e5b; --good: #2f7ed8;
  --fair: #b8860b; --poor: #d64550; }
@media (prefers-color-scheme: dark) { :root { --back: #14171c; --ink: #dde2ea; } }
.back { fill: var(--back); } text { fill: var(--ink); font: 12px ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace;
  white-space: pre; }
.name { font-weight: bold; } .best { fill: var(--best); } .good { fill: var(--good); } .fair { fill: var(--fair); }
.poor { fill: var(--poor); } .itself { fill: none; } rect { fill-opacity: 0.3; } .back { fill-opacity: 1; }
";

impl Topology {
    /// The matrix with a colour for each kind of way, and the notes below it.
    pub fn svg(&self) -> String {
        let columns = self.columns();
        let heads: Vec<&str> =
            columns.iter().map(|index| self.devices[*index].name.as_str()).chain(["NUMA"]).collect();
        let first =
            self.devices.iter().map(|device| text_width(&device.name, FONT)).fold(0.0, f64::max) + 12.0;
        let matrix = if columns.is_empty() { 0.0 } else { first + heads.len() as f64 * CELL.0 };
        let width = (matrix + 2.0 * MARGIN).max(LEAST_WIDTH);
        let mut body = String::new();
        let mut y = MARGIN + FONT;
        text(&mut body, ("name", "start"), (MARGIN, y), &self.heading());
        y += LINE;
        if !columns.is_empty() {
            let centre = |column: usize| MARGIN + first + (column as f64 + 0.5) * CELL.0;
            y += 4.0;
            for (column, head) in heads.iter().enumerate() {
                text(&mut body, ("name", "middle"), (centre(column), y), head);
            }
            y += 8.0;
            for (device, ways) in self.devices.iter().zip(&self.matrix) {
                let middle = y + CELL.1 / 2.0 + FONT * 0.35;
                text(&mut body, ("name", "start"), (MARGIN, middle), &device.name);
                for (column, index) in columns.iter().enumerate() {
                    let way = ways[*index];
                    let _ = writeln!(
                        body,
                        "<rect class=\"{}\" x=\"{:.1}\" y=\"{y:.1}\" width=\"{:.1}\" height=\"{:.1}\"><title>{}</title></rect>",
                        class(way),
                        centre(column) - CELL.0 / 2.0 + 1.0,
                        CELL.0 - 2.0,
                        CELL.1 - 2.0,
                        escape(&format!(
                            "{} to {}: {}",
                            device.name,
                            self.devices[*index].name,
                            way.meaning().unwrap_or("itself")
                        ))
                    );
                    text(&mut body, ("", "middle"), (centre(column), middle), &way.name());
                }
                let node = device.numa_node.map_or_else(|| "-".into(), |node| node.to_string());
                text(&mut body, ("", "middle"), (centre(columns.len()), middle), &node);
                y += CELL.1;
            }
            y += LINE;
        }
        let letters = ((width - 2.0 * MARGIN) / text_width("m", FONT)).floor() as usize;
        let screen = Screen { width: Some(letters), color: false };
        for note in self.notes() {
            for line in wrap(&note, 6, screen).lines() {
                text(&mut body, ("", "start"), (MARGIN, y), line);
                y += LINE;
            }
            if note.is_empty() {
                y += LINE / 2.0;
            }
        }
        let height = y - LINE + MARGIN + FONT * 0.3;
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width:.0} {height:.0}\" role=\"img\" \
             aria-label=\"{}\">\n<style>{STYLE}</style>\n<rect class=\"back\" width=\"{width:.0}\" height=\"{height:.0}\"/>\n\
             {body}</svg>\n",
            escape(&self.heading())
        )
    }
}

fn text(out: &mut String, (class, anchor): (&str, &str), (x, y): (f64, f64), what: &str) {
    let _ = writeln!(
        out,
        "<text class=\"{class}\" x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{}</text>",
        escape(what)
    );
}

const fn class(way: Way) -> &'static str {
    match way {
        Way::Itself => "itself",
        Way::To(PairPath::Nvlink(_)) => "best",
        Way::To(PairPath::Board | PairPath::Switch | PairPath::Switches) => "good",
        Way::To(PairPath::HostBridge | PairPath::Node) => "fair",
        Way::To(PairPath::System | PairPath::Unknown) => "poor",
    }
}

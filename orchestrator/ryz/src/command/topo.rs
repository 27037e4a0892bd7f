//! `ryz topo`

use ryzanstein_config::WorldSize;

use crate::doctor;
use crate::topo::{Preset, SyncTimes, Topology};

use crate::command::screen;

const EXAMPLES: &str = "Examples:
  ryz topo
  ryz topo --preset dgx-h100
  ryz topo --sync-times --ranks 16";

#[derive(clap::Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Show a made-up machine in place of this one
    #[arg(long, value_name = "NAME")]
    preset: Option<Preset>,
    /// Show how long adding up the gradients of known models takes on each interconnect, in place of a topology
    #[arg(long, conflicts_with = "preset")]
    sync_times: bool,
    /// The number of ranks that add up gradients [default: 8]
    #[arg(long, value_name = "N", requires = "sync_times")]
    ranks: Option<WorldSize>,
    /// A table, or one line of JSON
    #[arg(long, value_enum, default_value_t = screen::Format::Table)]
    format: screen::Format,
}

pub(crate) fn run(args: &Args, screen: &screen::Args) -> i32 {
    if args.sync_times {
        let times = SyncTimes::new(args.ranks.map_or(8, |ranks| ranks.get() as usize));
        screen.show(args.format, &times, |screen| times.table(screen));
    } else {
        let topology = args.preset.map_or_else(|| Topology::of(&doctor::hardware()), Preset::topology);
        screen.show(args.format, &topology, |screen| topology.table(screen));
    }
    0
}

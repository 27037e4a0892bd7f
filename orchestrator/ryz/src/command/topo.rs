//! `ryz topo`

use std::num::NonZeroUsize;

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
    ranks: Option<NonZeroUsize>,
    /// A table, or one line of JSON
    #[arg(long, value_enum, default_value_t = screen::Format::Table)]
    format: screen::Format,
}

pub(crate) fn run(args: &Args, screen: &screen::Args) -> i32 {
    let text = if args.sync_times { sync_times(args, screen) } else { topology(args, screen) };
    screen::print(&text);
    0
}

fn topology(args: &Args, screen: &screen::Args) -> String {
    let topology = args.preset.map_or_else(|| Topology::of(&doctor::hardware()), Preset::topology);
    match args.format {
        screen::Format::Table => topology.table(screen.stdout()),
        screen::Format::Json => topology.json() + "\n",
    }
}

fn sync_times(args: &Args, screen: &screen::Args) -> String {
    let times = SyncTimes::new(args.ranks.map_or(8, NonZeroUsize::get));
    match args.format {
        screen::Format::Table => times.table(screen.stdout()),
        screen::Format::Json => times.json() + "\n",
    }
}

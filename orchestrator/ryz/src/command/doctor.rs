//! `ryz doctor`

use std::time::Duration;

use crate::doctor::{self, HostLink, ProbeCommand, Report};
use anyhow::Context as _;
use ryzanstein_config::Config;
use ryzanstein_orchestrator::Orchestrator;
use ryzanstein_orchestrator::table::Screen;
use ryzanstein_process_group::Rank;
use ryzanstein_process_group::schedule::Hosts;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::command::probe;
use crate::command::rank;
use crate::command::screen;
use crate::command::settings;

const EXAMPLES: &str = "Examples:
  ryz doctor
  ryz doctor --format json
  srun --ntasks-per-node 1 ryz doctor";

/// Timeout of the ranks for the examination of every host.
const PATIENCE: Duration = Duration::from_secs(300);

#[derive(clap::Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(flatten)]
    file: settings::ConfigFile,
    /// Report as a table, or as one line of JSON
    #[arg(long, value_enum, default_value_t = screen::Format::Table)]
    format: screen::Format,
}

pub(crate) fn run(args: &Args, screen: &screen::Args) -> anyhow::Result<i32> {
    let config = args.file.load(Vec::new())?;
    if settings::is_launched(&config)? {
        return examine_job(args, screen, &config);
    }
    let report = examine(args, &config)?;
    screen.show(args.format, &report, |screen| report.table(screen));
    Ok(report.exit_code())
}

fn examine(args: &Args, config: &Config) -> anyhow::Result<Report> {
    let program = std::env::current_exe().context("cannot find this program")?;
    let mut arguments = vec![probe::NAME.into()];
    if let Some(file) = args.file.named() {
        arguments.extend(["--config".into(), file.into()]);
    }
    let probe_command = ProbeCommand { program: program.into(), arguments };
    Ok(doctor::examine(config, &settings::environment(), &probe_command))
}

/// The output of rank 0 for a host.
#[derive(Serialize, Deserialize)]
struct HostReport {
    text: String,
    json: Value,
    exit_code: i32,
}

/// Examines a job. The first rank of each host examines it; then all hosts are measured against each other, and rank 0 reports.
fn examine_job(args: &Args, screen: &screen::Args, config: &Config) -> anyhow::Result<i32> {
    let mut exit_code = 0;
    rank::run(config, |orchestrator| {
        let (reports, links) = job_reports(args, screen, config, orchestrator)?;
        if orchestrator.manager().rank() == Rank(0) {
            exit_code = reports.iter().map(|report| report.exit_code).max().unwrap_or(0);
            let hosts: Vec<&Value> = reports.iter().map(|report| &report.json).collect();
            screen.show(args.format, &json!({ "hosts": hosts, "links": links }), |screen| {
                let mut texts: Vec<String> = reports.into_iter().map(|report| report.text).collect();
                if !links.is_empty() {
                    texts.push(doctor::links_table(&links, screen));
                }
                texts.join("\n")
            });
        }
        Ok(())
    })?;
    Ok(exit_code)
}

fn job_reports(
    args: &Args,
    screen: &screen::Args,
    config: &Config,
    orchestrator: &mut Orchestrator,
) -> anyhow::Result<(Vec<HostReport>, Vec<HostLink>)> {
    let roster = orchestrator.manager().roster().clone();
    let rank = orchestrator.manager().rank();
    let is_first = Hosts::of(roster.members.iter().map(|member| &member.host)).place(rank.index()).1 == 0;
    let report = is_first.then(|| examine(args, config)).transpose()?;
    orchestrator.manager().store_barrier("every host is examined", PATIENCE)?;
    let world = orchestrator.manager().world();
    let stdout = screen.stdout();
    let (width, color) = world.broadcast_object(Some(&(stdout.width, stdout.color)), Rank(0))?;
    let links = doctor::measure_links(world, &roster)?;
    let own = report.map(|report| {
        let report = if rank == Rank(0) { report.and(doctor::diagnose_links(&links)) } else { report };
        let json = serde_json::to_value(&report).unwrap_or_default();
        HostReport { text: report.table(Screen { width, color }), json, exit_code: report.exit_code() }
    });
    let reports = world.all_gather_object(&own)?.into_iter().flatten().collect();
    Ok((reports, links))
}

//! What is to be launched on this node.

use std::ffi::OsString;
use std::ops::Range;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use ryzanstein_config::Config;
use ryzanstein_process_group::Rank;

/// Why a job could not be launched.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// The user asked for something that cannot be.
    #[error("{0}")]
    Configuration(String),
    /// Something went wrong here.
    #[error("{0}")]
    Failed(String),
}

impl LaunchError {
    pub(super) fn failed(what: &str, error: impl std::fmt::Display) -> Self {
        Self::Failed(format!("{what}: {error}"))
    }
}

/// One node's part of a job.
#[derive(Clone, Debug)]
pub struct Job {
    /// The program that every rank runs.
    pub program: PathBuf,
    /// Its arguments.
    pub arguments: Vec<OsString>,
    /// Variables that ranks get besides the launcher's own.
    pub environment: Vec<(String, String)>,
    /// The file that holds the job's secret; needed where the job has several nodes. None makes a fresh secret.
    pub secret_file: Option<PathBuf>,
    /// Pass the ranks' standard output on as it is, for ranks of which one alone has something to print.
    pub bare_stdout: bool,
    /// The settings. `job.world_size` must be set.
    pub config: Config,
}

impl Job {
    pub(super) fn world_size(&self) -> Result<u32, LaunchError> {
        let ranks = self.config.job.world_size.ok_or_else(|| {
            LaunchError::Configuration("how many ranks are there to be? Say it with --world-size N".into())
        })?;
        Ok(ranks.get())
    }

    /// The ranks that run on this node. Nodes are as equal as can be; the first ones have one more.
    pub(super) fn ranks(&self) -> Result<Range<u32>, LaunchError> {
        let (ranks, nodes) = (self.world_size()?, self.config.launch.nnodes.get());
        if ranks < nodes {
            return Err(LaunchError::Configuration(format!(
                "{ranks} ranks cannot be spread over {nodes} nodes: every node needs one at least"
            )));
        }
        let node = self.config.launch.node_rank;
        let first = |node: u32| node * (ranks / nodes) + node.min(ranks % nodes);
        Ok(first(node)..first(node + 1))
    }

    pub(super) fn log_folder(&self, rank: Rank) -> Option<PathBuf> {
        self.config.launch.log_dir.as_ref().map(|folder| folder.join(format!("rank-{rank}")))
    }
}

/// Looks for a program as a shell would, and says what is wrong with it before anything is started.
///
/// # Errors
/// [`LaunchError::Configuration`] for one that is not there or cannot be executed.
pub fn check_program(name: &Path, search_path: Option<&str>) -> Result<(), LaunchError> {
    let executable = |path: &Path| {
        std::fs::metadata(path)
            .is_ok_and(|metadata| metadata.is_file() && metadata.permissions().mode() & 0o111 != 0)
    };
    let shown = name.display();
    let refuse = |why: String| Err(LaunchError::Configuration(why));
    if name.components().count() > 1 {
        return match std::fs::metadata(name) {
            Err(error) => refuse(format!("the program `{shown}` cannot be run: {error}")),
            Ok(metadata) if metadata.is_dir() => refuse(format!("the program `{shown}` is a folder")),
            Ok(_) if !executable(name) => refuse(format!(
                "the program `{shown}` is not executable; `chmod +x {shown}`, or name its interpreter first"
            )),
            Ok(_) => Ok(()),
        };
    }
    let mut folders = search_path.unwrap_or_default().split(':');
    if folders.any(|folder| executable(&Path::new(folder).join(name))) {
        return Ok(());
    }
    if executable(name) {
        return refuse(format!(
            "the program `{shown}` is not on the PATH; for the one in this folder, write `./{shown}`"
        ));
    }
    refuse(format!("the program `{shown}` was not found on the PATH"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(ranks: u32, nodes: u32, node: u32) -> Job {
        let mut config = Config::default();
        config.job.world_size = ryzanstein_config::WorldSize::new(ranks).ok();
        config.launch.nnodes = std::num::NonZeroU32::new(nodes).expect("not zero");
        config.launch.node_rank = node;
        Job {
            program: "x".into(),
            arguments: vec![],
            environment: vec![],
            secret_file: None,
            bare_stdout: false,
            config,
        }
    }

    #[test]
    fn ranks_are_spread_over_nodes_without_gap_or_overlap() {
        for (ranks, nodes) in [(4, 1), (4, 2), (7, 3), (3, 3)] {
            let mut next = 0;
            for node in 0..nodes {
                let range = job(ranks, nodes, node).ranks().expect("a range");
                assert_eq!(range.start, next);
                assert!(!range.is_empty());
                next = range.end;
            }
            assert_eq!(next, ranks);
        }
        assert!(job(2, 3, 0).ranks().is_err());
    }
}

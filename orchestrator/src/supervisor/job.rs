//! The part of a job that this node launches.

use std::ffi::OsString;
use std::io;
use std::ops::Range;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use ryzanstein_config::Config;
use ryzanstein_process_group::Rank;

use crate::rendezvous::secret::SecretError;

/// The reason why a job could not be launched.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// The user's request is impossible.
    #[error("{0}")]
    Configuration(String),
    /// The secret that the user named cannot be used.
    #[error(transparent)]
    Secret(#[from] SecretError),
    /// The rendezvous cannot listen at its address. The message names the setting to change.
    #[error("{message}")]
    Listen {
        /// The whole sentence, from [`listen::explain`](crate::rendezvous::listen::explain).
        message: String,
        /// The operating system's error.
        source: io::Error,
    },
    /// The operating system refused an action on this node.
    #[error("{what}: {source}")]
    System {
        /// The action that failed.
        what: String,
        /// The operating system's error.
        source: io::Error,
    },
}

impl LaunchError {
    /// Returns a function for `map_err`; `what` is the action that failed.
    pub(super) fn system<E: Into<io::Error>>(what: impl Into<String>) -> impl FnOnce(E) -> Self {
        let what = what.into();
        move |source| Self::System { what, source: source.into() }
    }

    /// Returns true if launching again with the same flags and settings would fail again.
    pub const fn is_permanent(&self) -> bool {
        matches!(self, Self::Configuration(_) | Self::Secret(_))
    }

    /// Returns the error of a user who did not give the number of ranks.
    pub fn no_world_size() -> Self {
        Self::Configuration("world size is not set: pass --world-size N or set job.world_size".into())
    }
}

/// The form in which the output of ranks is passed on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RankOutput {
    /// Line by line, with the prefix `[rank R]`, which is coloured on the streams set to true.
    Prefixed {
        /// True for colours on standard output.
        stdout: bool,
        /// True for colours on standard error.
        stderr: bool,
    },
    /// Rank 0 writes to this process's standard output itself, and to its standard error where that is a terminal. With a log
    /// folder, its output passes through this process, unchanged. For commands that launch themselves, in which the other
    /// ranks print nothing but errors.
    Direct,
}

/// One node's part of a job.
#[derive(Clone, Debug)]
pub struct Job {
    /// The program that every rank runs.
    pub program: PathBuf,
    /// Its arguments.
    pub arguments: Vec<OsString>,
    /// Environment variables of the ranks, in addition to those of the launcher.
    pub environment: Vec<(String, String)>,
    /// The file with the job's secret; a job on several nodes needs one. `None` makes a fresh secret.
    pub secret_file: Option<PathBuf>,
    /// The folder of the socket on which `ryz status` finds the job, from [`status::folder`](crate::status::folder()). `None`
    /// serves none.
    pub status_folder: Option<PathBuf>,
    /// The form in which the ranks' output reaches that of this process.
    pub output: RankOutput,
    /// The configuration. `job.world_size` must be set.
    pub config: Config,
}

impl Job {
    pub(super) fn world_size(&self) -> Result<u32, LaunchError> {
        Ok(self.config.job.world_size.ok_or_else(LaunchError::no_world_size)?.get())
    }

    /// Returns the ranks that run on this node. Ranks are spread evenly; if they do not divide evenly, the first nodes take one
    /// more each.
    pub(super) fn ranks(&self) -> Result<Range<u32>, LaunchError> {
        let (ranks, nodes) = (self.world_size()?, self.config.launch.nnodes.get());
        if ranks < nodes {
            return Err(LaunchError::Configuration(format!(
                "{ranks} ranks cannot be spread over {nodes} nodes: every node needs at least one"
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

/// Finds a program as a shell would, before anything is started.
///
/// # Errors
/// [`LaunchError::Configuration`] if it does not exist or cannot be executed.
pub fn check_program(name: &Path, search_path: Option<&str>) -> Result<(), LaunchError> {
    let executable = |path: &Path| {
        std::fs::metadata(path)
            .is_ok_and(|metadata| metadata.is_file() && metadata.permissions().mode() & 0o111 != 0)
    };
    let shown = name.display();
    let refuse = |why: String| {
        let is_script = name.extension().is_some_and(|extension| extension == "py");
        let hint =
            if is_script { format!("; to run it with Python: python3 {shown}") } else { String::new() };
        Err(LaunchError::Configuration(why + &hint))
    };
    if name.components().count() > 1 {
        return match std::fs::metadata(name) {
            Err(error) => refuse(format!(
                "the program `{shown}` cannot be run: {error}; check the path; relative paths start in the current folder"
            )),
            Ok(metadata) if metadata.is_dir() => {
                refuse(format!("the program `{shown}` is a folder; name a program in it"))
            }
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
    refuse(format!("the program `{shown}` is not on the PATH; check the spelling, or give its full path"))
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
            status_folder: None,
            output: RankOutput::Prefixed { stdout: false, stderr: false },
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

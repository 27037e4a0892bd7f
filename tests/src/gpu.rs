//! Ranks on GPUs: as threads, or as processes of their own, which can be killed.

use std::net::{Ipv4Addr, TcpListener};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ryzanstein_config::{BackendChoice, DeviceConfig};
use ryzanstein_process_group::ProcessGroup;
use ryzanstein_process_group::device::{Libraries, LibrarySearch};
use ryzanstein_process_group::nvml::Nvml;
use tempfile::TempDir;

use crate::{config, in_good_order};

/// CUDA, NCCL and the other libraries of GPUs, looked for where this process's variables say.
pub fn libraries() -> Arc<Libraries> {
    let search = LibrarySearch::from_variables(|name| std::env::var(name).ok());
    Arc::new(Libraries::find(&DeviceConfig::default(), &search))
}

/// The GPUs that CUDA shows; none without a driver.
pub fn gpus() -> u32 {
    libraries().device_count().unwrap_or(0)
}

/// The number of GPUs, if there are so many. `scripts/gpu-suite` knows the words.
///
/// # Panics
/// When there are fewer.
pub fn need(wanted: usize) -> usize {
    let here = gpus() as usize;
    assert!(here >= wanted, "this test needs {wanted} GPUs and CUDA shows {here}");
    here
}

/// As many as tests with any number of them take.
///
/// # Panics
/// When there are not two.
pub fn some_gpus() -> usize {
    need(2).min(4)
}

/// Runs `job` on `world_size` ranks, each a thread with its own GPU, and returns the results by rank.
///
/// # Panics
/// As [`in_good_order`].
pub fn on_gpus<R: Send>(world_size: usize, job: impl Fn(&mut ProcessGroup) -> R + Sync) -> Vec<R> {
    in_good_order(&config(BackendChoice::Nccl), world_size, |manager| job(manager.world()))
}

/// Ranks that are processes, ended when this is dropped.
#[derive(Debug)]
pub struct Ranks {
    children: Vec<Child>,
    /// With what each of them says.
    folder: TempDir,
}

impl Ranks {
    /// Starts this test program again, `world_size` times, to run the one ignored test `name`, modules included, as one rank
    /// each. The test finds out by [`role`] that it is a rank.
    ///
    /// # Panics
    /// When a process cannot be started.
    pub fn start(name: &str, world_size: usize) -> Self {
        Self::start_at(name, world_size, |rank| rank)
    }

    /// [`start`](Self::start), each rank with the position on this host that `local` gives it, and so with that GPU.
    ///
    /// # Panics
    /// When a process cannot be started.
    pub fn start_at(name: &str, world_size: usize, local: impl Fn(usize) -> usize) -> Self {
        Self::start_with(name, world_size, |rank, command| {
            command.env("LOCAL_RANK", local(rank).to_string());
        })
    }

    /// [`start`](Self::start), each rank as `prepare` changes its command, which has no LOCAL_RANK.
    ///
    /// # Panics
    /// When a process cannot be started.
    pub fn start_with(name: &str, world_size: usize, prepare: impl Fn(usize, &mut Command)) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).and_then(|listener| listener.local_addr());
        let address = free.expect("a free port");
        let program = std::env::current_exe().expect("this program has a path");
        let children = (0..world_size)
            .map(|rank| {
                let log = std::fs::File::create(log_of(&folder, rank)).expect("a log file");
                let mut command = Command::new(&program);
                command
                    .args([name, "--exact", "--ignored", "--nocapture", "--test-threads=1"])
                    .env(ROLE, rank.to_string())
                    .env("RANK", rank.to_string())
                    .env_remove("LOCAL_RANK")
                    .env("WORLD_SIZE", world_size.to_string())
                    .env("MASTER_ADDR", address.ip().to_string())
                    .env("MASTER_PORT", address.port().to_string())
                    .env("XDG_RUNTIME_DIR", folder.path())
                    .stdout(log.try_clone().expect("a log file"))
                    .stderr(log)
                    .stdin(Stdio::null());
                prepare(rank, &mut command);
                command.spawn().expect("a rank starts")
            })
            .collect();
        Self { children, folder }
    }

    /// Returns the output of a rank so far.
    pub fn said(&self, rank: usize) -> String {
        std::fs::read_to_string(log_of(&self.folder, rank)).unwrap_or_default()
    }

    /// Waits until a rank has said this word.
    ///
    /// # Panics
    /// When it has not in time.
    pub fn wait_for(&self, rank: usize, word: &str, patience: Duration) {
        let until = Instant::now() + patience;
        while !self.said(rank).contains(word) {
            assert!(
                Instant::now() < until,
                "rank {rank} does not say `{word}` in {patience:?}:\n{}",
                self.said(rank)
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits until a rank has ended well, and shows what it has said.
    ///
    /// # Panics
    /// When it has not, in time.
    pub fn expect_success(&mut self, rank: usize, patience: Duration) {
        let status = self.end(rank, patience);
        let (well, said) = (status.is_some_and(|status| status.success()), self.said(rank));
        assert!(well, "rank {rank} ended with {status:?} (none: not in {patience:?}):\n{said}");
        assert!(said.contains("1 passed"), "rank {rank} has run no test:\n{said}");
        println!("{said}");
    }

    /// Waits until all have ended well.
    ///
    /// # Panics
    /// When one has not, in time.
    pub fn expect_all(mut self, patience: Duration) {
        (0..self.children.len()).for_each(|rank| self.expect_success(rank, patience));
    }

    /// Kills one rank, without a warning.
    ///
    /// # Panics
    /// When it cannot be killed.
    pub fn kill(&mut self, rank: usize) {
        self.children[rank].kill().expect("a rank can be killed");
    }

    /// Waits until a rank has ended; `None` if it has not in time.
    fn end(&mut self, rank: usize, patience: Duration) -> Option<ExitStatus> {
        let until = Instant::now() + patience;
        loop {
            if let Some(status) = self.children[rank].try_wait().expect("a rank can be waited for") {
                return Some(status);
            }
            if Instant::now() >= until {
                return None;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        for child in &mut self.children {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn log_of(folder: &TempDir, rank: usize) -> PathBuf {
    folder.path().join(format!("rank-{rank}.log"))
}

/// Set for processes that [`Ranks`] started, to their rank.
const ROLE: &str = "RYZANSTEIN_TEST_RANK";

/// Which rank this process is, if [`Ranks`] started it.
pub fn role() -> Option<usize> {
    std::env::var(ROLE).ok().and_then(|text| text.parse().ok())
}

/// Bytes in use on all GPUs of this host by anybody.
///
/// # Panics
/// Without NVML.
pub fn memory_used() -> u64 {
    Nvml::open().expect("NVML").memory_used().values().sum()
}

/// Waits until no more memory of the GPUs is in use than `before`.
///
/// # Panics
/// When it has not come to that in time.
pub fn wait_for_memory(before: u64, patience: Duration) {
    let until = Instant::now() + patience;
    loop {
        let now = memory_used();
        if now <= before {
            println!("GPU memory is back at {now} bytes, from {before} before");
            return;
        }
        assert!(Instant::now() < until, "{now} bytes of GPU memory are in use, {before} before");
        std::thread::sleep(Duration::from_millis(50));
    }
}

//! Ranks on GPUs: as processes of their own, which can be killed.

use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ryzanstein_config::DeviceConfig;
use ryzanstein_process_group::device::{Libraries, Surroundings};
use ryzanstein_process_group::nvml::Nvml;

/// The GPUs that CUDA shows; none without a driver.
pub fn gpus() -> u32 {
    let surroundings = Surroundings::from_variables(|name| std::env::var(name).ok());
    Arc::new(Libraries::find(&DeviceConfig::default(), &surroundings)).device_count().unwrap_or(0)
}

/// Ranks that are processes, ended when this is dropped.
#[derive(Debug)]
pub struct Ranks {
    children: Vec<Child>,
}

impl Ranks {
    /// Starts this test program again, `world_size` times, to run the one ignored test `name` as one rank each; output
    /// goes to `rank-R.log` in `folder`. The test finds out by [`role`] that it is a rank.
    ///
    /// # Panics
    /// When a process cannot be started.
    pub fn start(name: &str, world_size: usize, address: SocketAddr, folder: &Path) -> Self {
        Self::start_at(name, world_size, address, folder, |rank| rank)
    }

    /// [`start`](Self::start), each rank with the position on this host that `local` gives it, and so with that GPU.
    ///
    /// # Panics
    /// When a process cannot be started.
    pub fn start_at(
        name: &str,
        world_size: usize,
        address: SocketAddr,
        folder: &Path,
        local: impl Fn(usize) -> usize,
    ) -> Self {
        let program = std::env::current_exe().expect("this program has a path");
        let children = (0..world_size)
            .map(|rank| {
                let log = std::fs::File::create(folder.join(format!("rank-{rank}.log"))).expect("a log file");
                Command::new(&program)
                    .args([name, "--exact", "--ignored", "--nocapture", "--test-threads=1"])
                    .env(ROLE, rank.to_string())
                    .env("RANK", rank.to_string())
                    .env("LOCAL_RANK", local(rank).to_string())
                    .env("WORLD_SIZE", world_size.to_string())
                    .env("MASTER_ADDR", address.ip().to_string())
                    .env("MASTER_PORT", address.port().to_string())
                    .env("XDG_RUNTIME_DIR", folder)
                    .stdout(log.try_clone().expect("a log file"))
                    .stderr(log)
                    .stdin(Stdio::null())
                    .spawn()
                    .expect("a rank starts")
            })
            .collect();
        Self { children }
    }

    /// Kills one rank, without a warning.
    ///
    /// # Panics
    /// When it cannot be killed.
    pub fn kill(&mut self, rank: usize) {
        self.children[rank].kill().expect("a rank can be killed");
    }

    /// Waits until a rank has ended; `None` if it has not in time.
    ///
    /// # Panics
    /// When it cannot be waited for.
    pub fn end(&mut self, rank: usize, patience: Duration) -> Option<std::process::ExitStatus> {
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

/// Set for processes that [`Ranks`] started, to their rank.
const ROLE: &str = "RYZANSTEIN_TEST_RANK";

/// Which rank this process is, if [`Ranks`] started it.
pub fn role() -> Option<usize> {
    std::env::var(ROLE).ok().and_then(|text| text.parse().ok())
}

/// Waits until a file is there with this word in it, and returns it.
///
/// # Panics
/// When it has not come in time.
pub fn wait_for(file: &Path, word: &str, patience: Duration) -> String {
    let until = Instant::now() + patience;
    loop {
        let text = std::fs::read_to_string(file).unwrap_or_default();
        if text.contains(word) {
            return text;
        }
        assert!(Instant::now() < until, "`{word}` does not come in {}:\n{text}", file.display());
        std::thread::sleep(Duration::from_millis(5));
    }
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

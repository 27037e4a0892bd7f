//! Programs whose ranks are themselves, under `ryz launch`.

use std::path::Path;
use std::process::Command;

use anyhow::{Result, ensure};

/// Starts this program once for each rank, with the arguments `rank FOLDER` and those given, and waits.
///
/// # Errors
/// When `ryz` is not beside this program, or a rank fails.
pub fn launch(world_size: usize, backend: &str, folder: &Path, arguments: &[&str]) -> Result<()> {
    let this = std::env::current_exe()?;
    let ryz = this.with_file_name("ryz");
    ensure!(ryz.exists(), "{} is not there: run `cargo build --release` first", ryz.display());
    let status = Command::new(ryz)
        .args(["launch", "--backend", backend, "--world-size", &world_size.to_string(), "--"])
        .arg(this)
        .arg("rank")
        .arg(folder)
        .args(arguments)
        .status()?;
    ensure!(status.success(), "the ranks ended with {status}");
    Ok(())
}

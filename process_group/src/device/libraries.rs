//! The libraries that drive GPUs, searched for once.

use std::path::PathBuf;

use ryzanstein_config::DeviceConfig;

use super::cublaslt::CublasLt;
use super::discover::{Found, LibrarySearch, Missing, candidates, open};
use super::driver::Driver;
use super::error::DeviceError;
use super::nccl::Nccl;
use super::nvrtc::Nvrtc;
use super::symbols::foreign;

/// Each library, or the reason why it cannot be used. One binary runs on machines that have all of them and on those with none.
#[derive(Clone, Debug)]
pub struct Libraries {
    /// The driver.
    pub driver: Result<Found<Driver>, Missing>,
    /// NCCL.
    pub nccl: Result<Found<Nccl>, Missing>,
    /// The run-time compiler.
    pub nvrtc: Result<Found<Nvrtc>, Missing>,
    /// The matrix library.
    pub cublaslt: Result<Found<CublasLt>, Missing>,
    /// Folder of the compiled kernels; none if it is unknown.
    pub kernel_cache: Option<PathBuf>,
}

impl Libraries {
    /// Searches for all libraries. This is cheap on a machine without them: it tries a few file names.
    pub fn find(config: &DeviceConfig, search: &LibrarySearch) -> Self {
        let driver: Result<Found<Driver>, Missing> = {
            let key = "device.cuda";
            // A driver belongs to its kernel: only the loader's locations contain it.
            let nothing = LibrarySearch::default();
            open(key, candidates(key, config.cuda.as_deref(), &["libcuda.so.1"], &nothing))
        };
        // Libraries of CUDA 13 need a driver of version 13; those of CUDA 12 run on both.
        let newest = driver.as_ref().map_or(13, |d| d.version.0);
        let named = |base: &str| -> Vec<String> {
            [13, 12].into_iter().filter(|v| *v <= newest).map(|v| format!("{base}.so.{v}")).collect()
        };
        let all = |key: &'static str, configured: &Option<PathBuf>, names: &[String]| {
            let names: Vec<&str> = names.iter().map(String::as_str).collect();
            candidates(key, configured.as_deref(), &names, search)
        };
        Self {
            nccl: open("device.nccl", all("device.nccl", &config.nccl, &["libnccl.so.2".into()])),
            nvrtc: open("device.nvrtc", all("device.nvrtc", &config.nvrtc, &named("libnvrtc"))),
            cublaslt: open(
                "device.cublaslt",
                all("device.cublaslt", &config.cublaslt, &named("libcublasLt")),
            ),
            driver,
            kernel_cache: config
                .kernel_cache
                .clone()
                .or_else(|| search.cache.as_ref().map(|c| c.join("ryzanstein").join("kernels"))),
        }
    }

    /// Returns the number of GPUs that CUDA shows this process.
    ///
    /// # Errors
    /// Without a driver, or when it cannot be initialised.
    pub fn device_count(&self) -> Result<u32, DeviceError> {
        let driver = &self.driver.as_ref().map_err(Clone::clone)?.functions;
        // SAFETY: may be called any number of times, from any thread; flags must be zero.
        let code = unsafe { foreign!(driver, driver.cuInit(0)) };
        if code == 100 {
            return Ok(0);
        }
        driver.check(0, "cuInit", code)?;
        let mut count = 0;
        // SAFETY: the pointer is to a live integer, and the driver is initialised.
        let code = unsafe { foreign!(driver, driver.cuDeviceGetCount(&raw mut count)) };
        driver.check(0, "cuDeviceGetCount", code)?;
        Ok(count.unsigned_abs())
    }
}

use crate::doctor::facts::Library;
use crate::doctor::finding::{Finding, Status};

pub(super) fn diagnose(libraries: &[Library], gpus: usize) -> Vec<Finding> {
    let all = libraries.iter().map(|library| match &library.found {
        Ok(found) => Finding::new("libraries", library.name, Status::Ok, found),
        // Without a GPU the library has no use.
        Err(_) if gpus == 0 => {
            Finding::new("libraries", library.name, Status::Info, "not found, and not needed without a GPU")
        }
        Err(why) => {
            let needless = library.name == "nccl" && gpus == 1;
            let status = if needless { Status::Warning } else { Status::Broken };
            Finding::new("libraries", library.name, status, why)
                .because(format!("it is needed for {}", library.needed_for))
                .remedy(remedy(library.name))
        }
    });
    all.collect()
}

fn remedy(name: &str) -> &'static str {
    match name {
        "cuda_driver" => {
            "install NVIDIA's driver; in a container, start it with --gpus all, which brings libcuda.so.1 in"
        }
        "nccl" => {
            "pip install nvidia-nccl-cu13 (nvidia-nccl-cu12 for a driver of CUDA 12), or name the file with device.nccl"
        }
        "nvrtc" => {
            "pip install nvidia-cuda-nvrtc (nvidia-cuda-nvrtc-cu12 for a driver of CUDA 12), or name the file with device.nvrtc"
        }
        _ => {
            "pip install nvidia-cublas (nvidia-cublas-cu12 for a driver of CUDA 12), or name the file with device.cublaslt"
        }
    }
}

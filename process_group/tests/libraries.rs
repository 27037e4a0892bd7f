//! NVIDIA's own libraries, where they are installed: no GPU is needed. `VIRTUAL_ENV` names a Python environment with
//! `nvidia-cuda-nvrtc-cu12` and `nvidia-nccl-cu12`, or their successors.

use ryzanstein_config::DeviceConfig;
use ryzanstein_process_group::device::{Libraries, LibrarySearch, compile_for};

fn libraries() -> Libraries {
    Libraries::find(&DeviceConfig::default(), &LibrarySearch::from_variables(|name| std::env::var(name).ok()))
}

#[test]
#[ignore = "needs NCCL installed"]
fn nccl_is_found_with_its_version() {
    let nccl = libraries().nccl.unwrap();
    assert!(nccl.path.is_file(), "{}", nccl.path.display());
    println!("NCCL {} in {} by {}", nccl.version, nccl.path.display(), nccl.origin);
}

#[test]
#[ignore = "needs NVRTC installed"]
fn every_kernel_beside_nccl_compiles_for_every_type() {
    let nvrtc = libraries().nvrtc.unwrap();
    let source = include_str!("../src/gpu/nccl/reductions.cu");
    for capability in [(8, 0), (9, 0)] {
        for kind in 0..10 {
            for smallest in 0..2 {
                let options = [format!("-DKIND={kind}"), format!("-DSMALLEST={smallest}")];
                let options = [options[0].as_str(), options[1].as_str()];
                let code =
                    compile_for(&nvrtc.functions, capability, "reductions.cu", source, &options).unwrap();
                assert!(code.starts_with(b"\x7fELF"));
            }
        }
    }
    let error = compile_for(&nvrtc.functions, (9, 0), "bad.cu", "wrong", &[]).unwrap_err().to_string();
    assert!(error.contains("`bad.cu` does not compile for sm_90a") && error.contains("bad.cu(1)"), "{error}");
}

//! Kernels compiled at run time, and cached.
//!
//! Sources include no header, so that no toolkit is needed. Compiled code is cached in memory by source and options, and on disk by
//! source, options, compiler version and architecture. A file is written under a temporary name and then renamed, so that a reader
//! finds all of it or nothing. Disks lose parts of files, and the driver trusts its input: a digest at the end shows whether the
//! file is intact.

use std::collections::HashMap;
use std::ffi::{CString, c_char};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use cudarc::nvrtc::sys::nvrtcProgram;
use ryzanstein_config::{ByteSize, file};
use sha2::{Digest, Sha256};

use super::context::Context;
use super::discover::{Found, Missing};
use super::error::DeviceError;
use super::kernel::Module;
use super::libraries::Libraries;
use super::nvrtc::Nvrtc;
use super::symbols::foreign;
use super::symbols::{Version, hex, text};
use crate::types::sync::lock;

/// Maximum size of a cached module, far more than any takes.
const LARGEST_MODULE: ByteSize = ByteSize::mib(256);

/// The compiler for one GPU, with the modules that it has compiled.
pub struct Kernels {
    context: Arc<Context>,
    capability: (u32, u32),
    nvrtc: Result<Found<Nvrtc>, Missing>,
    folder: Option<PathBuf>,
    loaded: Mutex<HashMap<String, Arc<Module>>>,
}

impl Kernels {
    pub(super) fn new(context: &Arc<Context>, capability: (u32, u32), libraries: &Libraries) -> Self {
        Self {
            context: Arc::clone(context),
            capability,
            nvrtc: libraries.nvrtc.clone(),
            folder: libraries.kernel_cache.clone(),
            loaded: Mutex::default(),
        }
    }

    /// Returns the module of a source in CUDA C++, and compiles it if necessary. `name` is for errors.
    ///
    /// # Errors
    /// [`DeviceError::Compile`] with the compiler's log; [`DeviceError::Missing`] without a compiler.
    pub fn module(&self, name: &str, source: &str, options: &[&str]) -> Result<Arc<Module>, DeviceError> {
        let nvrtc = self.nvrtc.as_ref().map_err(Clone::clone)?;
        let target = Target::choose(self.capability, &supported(&nvrtc.functions)?);
        let key = key(source, options, nvrtc.version, &target.option());
        let mut loaded = lock(&self.loaded);
        if let Some(module) = loaded.get(&key) {
            return Ok(Arc::clone(module));
        }
        let file = self.folder.as_ref().map(|f| f.join(format!("{key}.{}", target.suffix())));
        let kept = file.as_deref().and_then(|f| match file::read_trusted(f, LARGEST_MODULE) {
            Err(error) if !error.is_not_found() => {
                tracing::warn!(file = %f.display(), %error, "a kept kernel is not used: it is compiled again");
                None
            }
            kept => kept.ok(),
        });
        // A cached file that is damaged or does not load is compiled again.
        let module =
            kept.and_then(|bytes| Module::load(&self.context, name, unsealed(&bytes)?.to_vec()).ok());
        let module = if let Some(module) = module {
            module
        } else {
            let code = compile(&nvrtc.functions, name, source, options, &target)?;
            let module = Module::load(&self.context, name, code.clone())?;
            if let Some(file) = &file
                && let Err(error) = keep(file, &code)
            {
                tracing::debug!(file = %file.display(), %error, "a compiled kernel could not be kept");
            }
            module
        };
        let module = Arc::new(module);
        loaded.insert(key, Arc::clone(&module));
        Ok(module)
    }
}

impl std::fmt::Debug for Kernels {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Kernels").field("folder", &self.folder).finish_non_exhaustive()
    }
}

/// The target of a compilation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Target {
    /// Machine code for exactly this architecture, with all its specific instructions.
    Cubin(u32),
    /// An intermediate language that the driver translates, for a GPU that is newer than the compiler.
    Ptx(u32),
}

impl Target {
    fn choose((major, minor): (u32, u32), supported: &[u32]) -> Self {
        let own = major * 10 + minor;
        let newest = supported.iter().copied().filter(|a| *a <= own).max();
        match newest {
            Some(a) if a != own => Self::Ptx(a),
            _ => Self::Cubin(own),
        }
    }

    fn option(self) -> String {
        match self {
            // `a`: instructions of this architecture only, which its own machine code may use.
            Self::Cubin(a) if a >= 90 => format!("sm_{a}a"),
            Self::Cubin(a) => format!("sm_{a}"),
            Self::Ptx(a) => format!("compute_{a}"),
        }
    }

    fn suffix(self) -> &'static str {
        match self {
            Self::Cubin(_) => "cubin",
            Self::Ptx(_) => "ptx",
        }
    }
}

fn key(source: &str, options: &[&str], compiler: Version, target: &str) -> String {
    let mut hash = Sha256::new();
    for part in [source, &compiler.to_string(), target].into_iter().chain(options.iter().copied()) {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    hex(&hash.finalize())
}

/// Returns the cached form of compiled code: the code, followed by its digest.
fn sealed(code: &[u8]) -> Vec<u8> {
    [code, &Sha256::digest(code)].concat()
}

/// Returns the code, if it is complete and unchanged.
fn unsealed(kept: &[u8]) -> Option<&[u8]> {
    let (code, digest) = kept.split_last_chunk::<32>()?;
    (<[u8; 32]>::from(Sha256::digest(code)) == *digest).then_some(code)
}

/// Writes the file completely or not at all. Others may write the same file at the same time.
fn keep(path: &Path, code: &[u8]) -> std::io::Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    let folder = path.parent().unwrap_or(Path::new("."));
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    file::replace(path, &sealed(code))
}

fn status(nvrtc: &Nvrtc, code: i32) -> String {
    // SAFETY: any code is accepted; the answer is constant text.
    let words = unsafe { text(foreign!(nvrtc, nvrtc.nvrtcGetErrorString(code code))) };
    format!("NVRTC error {code}, {words}")
}

fn check(nvrtc: &Nvrtc, call: &str, code: i32) -> Result<(), DeviceError> {
    if code == 0 { Ok(()) } else { Err(DeviceError::invalid(format!("{call}: {}", status(nvrtc, code)))) }
}

fn supported(nvrtc: &Nvrtc) -> Result<Vec<u32>, DeviceError> {
    let mut count = 0;
    // SAFETY: the pointer is to a live integer.
    check(nvrtc, "nvrtcGetNumSupportedArchs", unsafe {
        foreign!(nvrtc, nvrtc.nvrtcGetNumSupportedArchs(&raw mut count))
    })?;
    let mut all = vec![0i32; count.unsigned_abs() as usize];
    if !all.is_empty() {
        // SAFETY: the list has as many places as the library asked for.
        check(nvrtc, "nvrtcGetSupportedArchs", unsafe {
            foreign!(nvrtc, nvrtc.nvrtcGetSupportedArchs(all.as_mut_ptr()))
        })?;
    }
    Ok(all.into_iter().map(i32::unsigned_abs).collect())
}

fn zero_ended(what: &str, text: &str) -> Result<CString, DeviceError> {
    CString::new(text).map_err(|_| DeviceError::invalid(format!("the {what} of a kernel holds a zero byte")))
}

/// A program in compilation, destroyed on every exit path.
struct Program<'a> {
    nvrtc: &'a Nvrtc,
    handle: nvrtcProgram,
}

impl Drop for Program<'_> {
    fn drop(&mut self) {
        // SAFETY: made by nvrtcCreateProgram, destroyed once.
        let _ = unsafe { foreign!(nvrtc, self.nvrtc.nvrtcDestroyProgram(&raw mut self.handle)) };
    }
}

/// Reads the log or the code of a program: one function returns its length, another its content.
macro_rules! content {
    ($program:ident, $call:literal, $size:ident, $get:ident) => {{
        let (nvrtc, handle) = ($program.nvrtc, $program.handle);
        let mut length = 0;
        // SAFETY: the program lives, the pointer is to a live integer.
        check(nvrtc, $call, unsafe { foreign!(nvrtc, nvrtc.$size(handle, &raw mut length)) })?;
        let mut bytes = vec![0u8; length];
        // SAFETY: the program lives, and there is as much room as the library asked for.
        check(nvrtc, $call, unsafe { foreign!(nvrtc, nvrtc.$get(handle, bytes.as_mut_ptr().cast())) })?;
        bytes
    }};
}

fn compile(
    nvrtc: &Nvrtc,
    name: &str,
    source: &str,
    options: &[&str],
    target: &Target,
) -> Result<Vec<u8>, DeviceError> {
    let (c_source, c_name) = (zero_ended("source", source)?, zero_ended("name", name)?);
    let architecture = format!("--gpu-architecture={}", target.option());
    let all = [architecture.as_str(), "--std=c++17", "--device-as-default-execution-space"];
    let options: Vec<CString> =
        all.iter().chain(options).map(|o| zero_ended("options", o)).collect::<Result<_, _>>()?;
    let pointers: Vec<*const c_char> = options.iter().map(|o| o.as_ptr()).collect();
    let mut program = Program { nvrtc, handle: std::ptr::null_mut() };
    // SAFETY: source and name end with zeros and live through the call; there are no headers.
    let code = unsafe {
        foreign!(
            nvrtc,
            nvrtc.nvrtcCreateProgram(
                &raw mut program.handle,
                c_source.as_ptr(),
                c_name.as_ptr(),
                0,
                std::ptr::null(),
                std::ptr::null(),
            )
        )
    };
    check(nvrtc, "nvrtcCreateProgram", code)?;
    // SAFETY: the program lives; the options end with zeros and live through the call.
    let code = unsafe {
        foreign!(nvrtc, nvrtc.nvrtcCompileProgram(program.handle, pointers.len() as i32, pointers.as_ptr()))
    };
    if code != 0 {
        let log = content!(program, "nvrtcGetProgramLog", nvrtcGetProgramLogSize, nvrtcGetProgramLog);
        return Err(DeviceError::Compile {
            kernel: name.into(),
            architecture: target.option(),
            status: status(nvrtc, code),
            log: String::from_utf8_lossy(&log).trim_end_matches(['\0', '\n']).to_owned(),
        });
    }
    Ok(match target {
        Target::Cubin(_) => content!(program, "nvrtcGetCUBIN", nvrtcGetCUBINSize, nvrtcGetCUBIN),
        Target::Ptx(_) => content!(program, "nvrtcGetPTX", nvrtcGetPTXSize, nvrtcGetPTX),
    })
}

/// Compiles a source for an architecture without a GPU, to check that it compiles. Returns the machine code, or PTX for the newest
/// architecture that the compiler knows if that is older.
///
/// # Errors
/// [`DeviceError::Compile`] with the compiler's log; [`DeviceError::Invalid`] for a source with a zero byte.
pub fn compile_for(
    nvrtc: &Nvrtc,
    capability: (u32, u32),
    name: &str,
    source: &str,
    options: &[&str],
) -> Result<Vec<u8>, DeviceError> {
    compile(nvrtc, name, source, options, &Target::choose(capability, &supported(nvrtc)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machine_code_where_the_compiler_knows_the_gpu_else_what_the_driver_translates() {
        assert_eq!(Target::choose((9, 0), &[80, 90, 100]).option(), "sm_90a");
        assert_eq!(Target::choose((8, 0), &[80, 90]).option(), "sm_80");
        assert_eq!(Target::choose((12, 0), &[80, 90]).option(), "compute_90");
        // A compiler that does not list its architectures is asked for the needed one.
        assert_eq!(Target::choose((9, 0), &[]).option(), "sm_90a");
    }

    #[test]
    fn the_key_of_a_kernel_changes_with_everything_that_changes_its_code() {
        let base = key("a", &["-x"], Version(12, 8, 0), "sm_90a");
        for other in [
            key("b", &["-x"], Version(12, 8, 0), "sm_90a"),
            key("a", &["-y"], Version(12, 8, 0), "sm_90a"),
            key("a", &["-x", "-x"], Version(12, 8, 0), "sm_90a"),
            key("a", &["-x"], Version(13, 0, 0), "sm_90a"),
            key("a", &["-x"], Version(12, 8, 0), "sm_100a"),
        ] {
            assert_ne!(base, other);
        }
        assert_eq!(base, key("a", &["-x"], Version(12, 8, 0), "sm_90a"));
    }

    #[test]
    fn a_kept_file_is_there_whole_and_nothing_is_left_beside_it() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("deep").join("k.cubin");
        keep(&file, b"code").unwrap();
        keep(&file, b"code2").unwrap();
        assert_eq!(unsealed(&std::fs::read(&file).unwrap()), Some(&b"code2"[..]));
        assert_eq!(std::fs::read_dir(file.parent().unwrap()).unwrap().count(), 1);
    }

    #[test]
    fn a_kept_file_that_is_cut_or_changed_anywhere_is_not_used() {
        // At least as long as the header of an ELF file, and with its first bytes.
        let code = [&b"\x7fELF"[..], &[7; 100], b"\0"].concat();
        let kept = sealed(&code);
        assert_eq!(unsealed(&kept), Some(&code[..]));
        for length in 0..kept.len() {
            assert_eq!(unsealed(&kept[..length]), None, "the first {length} bytes");
            let mut changed = kept.clone();
            changed[length] ^= 1;
            assert_eq!(unsealed(&changed), None, "byte {length}");
        }
        // Code that was cached without a digest is not used either.
        assert_eq!(unsealed(&code), None);
    }
}

//! Ranges that NVIDIA's profilers show on their time line, by NVTX 3.
//!
//! NVTX has no library of its own: a program is the client that its headers make of it. The client opens the profiler's library,
//! which the profiler names in a variable, and hands it tables of pointers, which the library fills with its functions. This is
//! that client, for ranges of threads, the only thing used here. What the tables look like was taken from NVTX 3's headers
//! `nvtxTypes.h` and `nvtxInit.h`, of which no later release may change them.

use std::ffi::{CStr, OsStr, c_char, c_int, c_uint, c_void};
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

use libloading::os::unix::Library;

/// The variable in which a profiler names its library.
pub const INJECTION: &str = "NVTX_INJECTION64_PATH";

/// Functions of a module: the largest has this many, with the unused number 0.
const FUNCTIONS: usize = 16;
/// The numbers of two functions of the module `CORE`.
const RANGE_PUSH: usize = 9;
const RANGE_POP: usize = 11;

type RangePush = unsafe extern "C" fn(*const c_char) -> c_int;
type RangePop = unsafe extern "C" fn() -> c_int;
type GetExportTable = unsafe extern "C" fn(u32) -> *const c_void;
type Initialize = unsafe extern "C" fn(GetExportTable) -> c_int;

/// A place that the profiler's library writes a function into.
type Place = AtomicPtr<c_void>;

static CORE: [Place; FUNCTIONS] = [const { AtomicPtr::new(ptr::null_mut()) }; FUNCTIONS];
/// Functions of domains. Profilers expect the module; nothing here calls it.
static CORE2: [Place; FUNCTIONS] = [const { AtomicPtr::new(ptr::null_mut()) }; FUNCTIONS];

/// Pointers to the places of a module, as the library gets them, and a null at the end.
struct Places([*const Place; FUNCTIONS + 1]);

// SAFETY: the pointers are to statics of atomics, which every thread may use.
unsafe impl Sync for Places {}

const fn places(module: &'static [Place; FUNCTIONS]) -> Places {
    let mut places = [ptr::null(); FUNCTIONS + 1];
    let mut number = 1;
    while number < FUNCTIONS {
        places[number] = &raw const module[number];
        number += 1;
    }
    Places(places)
}

static CORE_PLACES: Places = places(&CORE);
static CORE2_PLACES: Places = places(&CORE2);

#[repr(C)]
struct Callbacks {
    bytes: usize,
    module: unsafe extern "C" fn(c_int, *mut *const *const Place, *mut c_uint) -> c_int,
}

#[repr(C)]
struct VersionInfo {
    bytes: usize,
    version: u32,
    reserved: u32,
    set_tools_version: unsafe extern "C" fn(u32),
}

static CALLBACKS: Callbacks = Callbacks { bytes: size_of::<Callbacks>(), module: module_table };
static VERSION: VersionInfo =
    VersionInfo { bytes: size_of::<VersionInfo>(), version: 3, reserved: 0, set_tools_version };
static TOOLS_VERSION: AtomicU32 = AtomicU32::new(0);

unsafe extern "C" fn set_tools_version(version: u32) {
    TOOLS_VERSION.store(version, Ordering::Relaxed);
}

unsafe extern "C" fn export_table(number: u32) -> *const c_void {
    match number {
        1 => (&raw const CALLBACKS).cast(),
        3 => (&raw const VERSION).cast(),
        _ => ptr::null(),
    }
}

unsafe extern "C" fn module_table(
    module: c_int,
    table: *mut *const *const Place,
    size: *mut c_uint,
) -> c_int {
    let places = match module {
        1 => &CORE_PLACES,
        5 => &CORE2_PLACES,
        _ => return 0,
    };
    if !size.is_null() {
        // SAFETY: the library passes null or a live integer, as NVTX demands.
        unsafe { size.write(FUNCTIONS as c_uint) };
    }
    if !table.is_null() {
        // SAFETY: likewise, a live pointer.
        unsafe { table.write(places.0.as_ptr()) };
    }
    1
}

/// Why no profiler could be attached.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum NvtxError {
    /// The library cannot be opened, or lacks the function.
    #[error("{INJECTION} names {library}, which cannot be used: {why}")]
    Library {
        /// The library.
        library: String,
        /// What the loader said.
        why: String,
    },
    /// The library refused.
    #[error("{INJECTION} names {0}, which refused to attach")]
    Refused(String),
}

/// A profiler that takes ranges.
#[derive(Clone, Copy, Debug)]
pub struct Nvtx {
    push: RangePush,
    pop: RangePop,
}

impl Nvtx {
    /// Attaches the library that a profiler has named in [`INJECTION`], once in a process. `None` where it takes no ranges.
    ///
    /// # Errors
    /// [`NvtxError`] when the library cannot be used.
    pub fn attach(library: &OsStr) -> Result<Option<Self>, NvtxError> {
        static ATTACHED: OnceLock<Result<Option<Nvtx>, NvtxError>> = OnceLock::new();
        ATTACHED.get_or_init(|| initialize(library)).clone()
    }

    /// Begins a range on this thread, inside of those that it has begun before.
    pub fn push(self, name: &CStr) {
        // SAFETY: the library's own function, which is loaded for good; it copies the text, and returns the depth or an error,
        // neither of which matters.
        unsafe { (self.push)(name.as_ptr()) };
    }

    /// Ends the range that this thread has begun last.
    pub fn pop(self) {
        // SAFETY: as in `push`; without a range it returns an error.
        unsafe { (self.pop)() };
    }
}

fn initialize(library: &OsStr) -> Result<Option<Nvtx>, NvtxError> {
    let name = || library.to_string_lossy().into_owned();
    let unusable = |error: libloading::Error| NvtxError::Library { library: name(), why: error.to_string() };
    // SAFETY: runs the library's constructors. The user's profiler has named it, to be run in this process.
    let opened = unsafe { Library::new(library) }.map_err(unusable)?;
    // SAFETY: of this type in every library that NVTX's variable may name.
    let initialize = unsafe { opened.get::<Initialize>(b"InitializeInjectionNvtx2\0") }.map_err(unusable)?;
    // SAFETY: the tables are statics of the layout that NVTX 3 fixes. What cannot be checked: that the library is for NVTX 2 or 3,
    // and writes only functions of the types that belong to their numbers.
    let is_attached = unsafe { initialize(export_table) } != 0;
    if !is_attached {
        return Err(NvtxError::Refused(name()));
    }
    // Its functions are called until the process ends.
    std::mem::forget(opened);
    let [push, pop] = [RANGE_PUSH, RANGE_POP].map(|number| CORE[number].load(Ordering::Acquire));
    if push.is_null() || pop.is_null() {
        return Ok(None);
    }
    // SAFETY: not null, and written by the library as the functions of these numbers, whose types NVTX fixes.
    let (push, pop) = unsafe {
        (
            std::mem::transmute::<*mut c_void, RangePush>(push),
            std::mem::transmute::<*mut c_void, RangePop>(pop),
        )
    };
    Ok(Some(Nvtx { push, pop }))
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    /// A profiler that remembers the depth and the names of ranges.
    const PROFILER: &str = r#"
        #include <stddef.h>
        #include <stdint.h>
        #include <string.h>
        typedef void (*fn)(void);
        typedef const void *(*get_table)(uint32_t);
        struct callbacks { size_t size; int (*module)(int, fn ***, unsigned *); };
        struct version { size_t size; uint32_t version, reserved; void (*set)(uint32_t); };
        static char log_[4096];
        static int depth;
        static int push(const char *name) { strcat(log_, "<"); strcat(log_, name); return depth++; }
        static int pop(void) { strcat(log_, ">"); return --depth; }
        const char *seen(void) { return log_; }
        int InitializeInjectionNvtx2(get_table get) {
            const struct version *version = get(3);
            const struct callbacks *callbacks = get(1);
            fn **table; unsigned size;
            if (!version || version->size < sizeof *version || version->version < 2) return 0;
            version->set(3);
            if (!callbacks->module(5, &table, &size) || size <= 15 || !table[15]) return 0;
            *table[15] = (fn)pop;
            if (callbacks->module(4, &table, &size)) return 0;
            if (!callbacks->module(1, &table, &size) || size <= 11) return 0;
            *table[9] = (fn)push;
            *table[11] = (fn)pop;
            return 1;
        }
    "#;

    #[test]
    fn a_profilers_library_gets_the_ranges_of_a_thread() {
        let folder = tempfile::tempdir().unwrap();
        let (source, library) = (folder.path().join("profiler.c"), folder.path().join("profiler.so"));
        std::fs::write(&source, PROFILER).unwrap();
        // Rust links with the same compiler.
        let built = Command::new("cc").args(["-shared", "-fPIC", "-o"]).args([&library, &source]).status();
        assert!(built.unwrap().success());

        let nvtx = Nvtx::attach(library.as_os_str()).unwrap().expect("it takes ranges");
        nvtx.push(c"outer");
        nvtx.push(c"inner");
        nvtx.pop();
        nvtx.pop();
        assert_eq!(TOOLS_VERSION.load(Ordering::Relaxed), 3);
        // SAFETY: the library is loaded already; `seen` has this type, and returns a text that ends with a zero.
        let seen = unsafe {
            let opened = Library::new(&library).unwrap();
            let seen = opened.get::<unsafe extern "C" fn() -> *const c_char>(b"seen\0").unwrap();
            CStr::from_ptr(seen()).to_str().unwrap().to_owned()
        };
        assert_eq!(seen, "<outer<inner>>");
    }

    #[test]
    fn a_library_that_is_not_there_is_an_error_that_names_it() {
        let error = initialize(OsStr::new("/nowhere/profiler.so")).unwrap_err().to_string();
        assert!(error.contains("NVTX_INJECTION64_PATH") && error.contains("/nowhere/profiler.so"), "{error}");
    }
}

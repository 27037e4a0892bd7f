//! Functions of libraries that are found at run time.
//!
//! A table of [`Symbol`]s is loaded completely or not at all, so that no call can find a missing one. No signature is written here:
//! [`foreign!`](crate::foreign) takes argument types from cudarc's function of the same name, so a call with other arguments does
//! not compile. Status codes are plain integers, not cudarc's enumerations: a library newer than its bindings returns codes that
//! the enumerations lack, and such a value must not exist.

use std::ffi::{c_char, c_void};
use std::path::PathBuf;
use std::ptr::NonNull;

use libloading::os::unix::Library;

/// An opaque handle of a library: a pointer that is never dereferenced.
pub type Handle = usize;
/// An address in the memory of a GPU.
pub type Address = u64;

/// A table of functions, which [`functions!`] declares.
pub(crate) trait Functions: Sized {
    /// Loads every function from an open library, or names the missing one.
    fn load(library: &Library) -> Result<Self, Unusable>;

    /// Returns the address of any of its functions, to find its file.
    fn address(&self) -> usize;
}

/// The functions of a known library.
pub(crate) trait Table: Functions {
    /// The usual name of the library.
    const NAME: &'static str;
    /// The oldest supported version.
    const MINIMUM: Version;

    /// Queries the version of the library.
    fn version(&self) -> Result<Version, Unusable>;

    /// Returns the reason why a library that is new enough cannot be used.
    fn refuse(&self) -> Result<(), Unusable> {
        Ok(())
    }
}

/// The reason why a library cannot be used.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Unusable {
    /// The file does not exist.
    #[error("not there")]
    NotThere,
    /// The loader rejects the file, with this message.
    #[error("{0}")]
    Loader(String),
    /// A function is missing.
    #[error("it has no function {0}")]
    NoFunction(&'static str),
    /// The library does not report its version.
    #[error("{call} returned {code}")]
    NoVersion {
        /// The function that was called.
        call: &'static str,
        /// The status it returned.
        code: i32,
    },
    /// The library is too old.
    #[error("it is version {found}, older than {minimum}")]
    TooOld {
        /// Its version.
        found: Version,
        /// The oldest supported version.
        minimum: Version,
    },
    /// cudarc, which loads the driver by name, does not find it.
    #[error(
        "cudarc loads CUDA's driver by the loader's names, under which it is not found; put its folder into \
         LD_LIBRARY_PATH"
    )]
    UnknownToLoader,
    /// cudarc, which loads the driver by name, gets another file.
    #[error(
        "cudarc loads CUDA's driver by the loader's names, under which it gets {}; put this one's folder first in \
         LD_LIBRARY_PATH", .0.as_ref().map_or_else(|| "another file".into(), |file| file.display().to_string())
    )]
    Shadowed(Option<PathBuf>),
}

/// A version of a library: major, minor, patch.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Version(pub u32, pub u32, pub u32);

impl std::fmt::Display for Version {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(&format!("{}.{}.{}", self.0, self.1, self.2))
    }
}

/// A function of an open library that is never closed. [`foreign!`](crate::foreign) calls it.
#[derive(Clone, Copy, Debug)]
pub struct Symbol(NonNull<c_void>);

// SAFETY: the address of code, which any thread may read.
unsafe impl Send for Symbol {}
// SAFETY: as above.
unsafe impl Sync for Symbol {}

impl Symbol {
    pub(crate) fn find(library: &Library, name: &'static str) -> Result<Self, Unusable> {
        let missing = || Unusable::NoFunction(name);
        // SAFETY: nothing is called; what is asked for is an address.
        let symbol = unsafe { library.get::<*mut c_void>(name.as_bytes()) }.map_err(|_| missing())?;
        NonNull::new(symbol.as_raw_ptr()).map(Self).ok_or_else(missing)
    }

    /// As [`Symbol::find`], in a library that cudarc has opened and never closes.
    pub(crate) fn find_in(
        library: &'static libloading::Library,
        name: &'static str,
    ) -> Result<Self, Unusable> {
        let missing = || Unusable::NoFunction(name);
        // SAFETY: nothing is called; what is asked for is an address.
        let symbol = unsafe { library.get::<*mut c_void>(name.as_bytes()) }.map_err(|_| missing())?;
        NonNull::new(*symbol).map(Self).ok_or_else(missing)
    }

    pub(crate) fn address(self) -> usize {
        self.0.as_ptr() as usize
    }

    /// Returns the function as a pointer with the arguments of cudarc's function, which returns a plain integer for a status.
    ///
    /// # Safety
    /// The argument must be cudarc's function of the name under which this symbol was found.
    pub unsafe fn of<F: Binding>(self, _: F) -> F::Pointer {
        const { assert!(size_of::<F::Pointer>() == size_of::<Self>()) };
        // SAFETY: both are the address of the same function, whose signature is cudarc's but for status codes, which are
        // 32-bit integers for the library.
        unsafe { std::mem::transmute_copy(&self) }
    }

    /// As [`Symbol::of`], for a function that explains a status code: it takes any integer.
    ///
    /// # Safety
    /// As [`Symbol::of`].
    pub unsafe fn of_code<F: CodeBinding>(self, _: F) -> F::Pointer {
        const { assert!(size_of::<F::Pointer>() == size_of::<Self>()) };
        // SAFETY: as above.
        unsafe { std::mem::transmute_copy(&self) }
    }
}

mod sealed {
    /// Prevents implementations outside this module.
    pub trait Sealed {}
}

/// The return type of a library's function: a status is a plain integer here.
pub trait Returned: sealed::Sealed {
    /// The same, as a type for which every value that the library may return is valid.
    type Plain;
}

macro_rules! returned {
    ($($type:ty => $plain:ty),* $(,)?) => { $(
        impl sealed::Sealed for $type {}
        impl Returned for $type { type Plain = $plain; }
    )* };
}

returned! {
    cudarc::driver::sys::CUresult => i32,
    cudarc::nccl::sys::ncclResult_t => i32,
    cudarc::nvrtc::sys::nvrtcResult => i32,
    cudarc::cublaslt::sys::cublasStatus_t => i32,
    *const c_char => *const c_char,
    usize => usize,
}

/// One of cudarc's functions.
pub trait Binding: Copy + sealed::Sealed {
    /// The library's function.
    type Pointer: Copy;
}

/// One of cudarc's functions whose first argument is a status code.
pub trait CodeBinding: Copy + sealed::Sealed {
    /// The library's function, which takes an integer there.
    type Pointer: Copy;
}

impl<C: Returned<Plain = i32>, R: Returned> CodeBinding for unsafe fn(C) -> R {
    type Pointer = unsafe extern "C" fn(i32) -> R::Plain;
}

impl<C: Returned<Plain = i32>, R: Returned, A1> CodeBinding for unsafe fn(C, A1) -> R {
    type Pointer = unsafe extern "C" fn(i32, A1) -> R::Plain;
}

macro_rules! bindings {
    ($($argument:ident)*) => {
        impl<R: Returned, $($argument),*> sealed::Sealed for unsafe fn($($argument),*) -> R {}
        impl<R: Returned, $($argument),*> Binding for unsafe fn($($argument),*) -> R {
            type Pointer = unsafe extern "C" fn($($argument),*) -> R::Plain;
        }
    };
}

bindings!();
bindings!(A1);
bindings!(A1 A2);
bindings!(A1 A2 A3);
bindings!(A1 A2 A3 A4);
bindings!(A1 A2 A3 A4 A5);
bindings!(A1 A2 A3 A4 A5 A6);
bindings!(A1 A2 A3 A4 A5 A6 A7);
bindings!(A1 A2 A3 A4 A5 A6 A7 A8);
bindings!(A1 A2 A3 A4 A5 A6 A7 A8 A9);
bindings!(A1 A2 A3 A4 A5 A6 A7 A8 A9 A10);
bindings!(A1 A2 A3 A4 A5 A6 A7 A8 A9 A10 A11 A12);
bindings!(A1 A2 A3 A4 A5 A6 A7 A8 A9 A10 A11 A12 A13 A14 A15 A16);

/// Calls a library's function: `foreign!(nccl, table.ncclCommAbort(communicator))`. The first word is cudarc's module of the
/// library; argument types are those of cudarc's function of that name, and a status is returned as an `i32`. Functions that
/// explain a status code are called with `code` before it: `foreign!(nccl, table.ncclGetErrorString(code 5))`.
///
/// Calling it is `unsafe`: the library's own rules hold.
///
/// ```
/// use ryzanstein_process_group::{device::Nccl, foreign};
///
/// fn version(table: &Nccl) -> (i32, i32) {
///     let mut version = 0;
///     let status = unsafe { foreign!(nccl, table.ncclGetVersion(&raw mut version)) };
///     (status, version)
/// }
/// ```
///
/// Other arguments than cudarc's do not compile:
///
/// ```compile_fail
/// use ryzanstein_process_group::{device::Nccl, foreign};
///
/// fn version(table: &Nccl) -> i32 {
///     let mut version = 0u64;
///     unsafe { foreign!(nccl, table.ncclGetVersion(&raw mut version)) }
/// }
/// ```
#[macro_export]
macro_rules! foreign {
    (@hole $argument:expr) => { _ };
    ($library:ident, $($table:ident).+ ($($argument:expr),* $(,)?)) => {
        $crate::foreign!(@split $library, [] $($table).+ ; $($argument),*)
    };
    ($library:ident, $($table:ident).+ (code $code:expr $(, $argument:expr)* $(,)?)) => {
        $crate::foreign!(@code $library, [] $($table).+ ; $code ; $($argument),*)
    };
    (@split $library:ident, [$($before:tt)*] $part:ident . $($rest:ident).+ ; $($argument:expr),*) => {
        $crate::foreign!(@split $library, [$($before)* $part .] $($rest).+ ; $($argument),*)
    };
    (@split $library:ident, [$($table:tt)*] $function:ident ; $($argument:expr),*) => {
        {
            // cudarc's declaration: the arguments must match it.
            let binding: unsafe fn($($crate::foreign!(@hole $argument)),*) -> _ =
                $crate::device::cudarc::$library::sys::$function;
            $($table)* $function.of(binding)($($argument),*)
        }
    };
    (@code $library:ident, [$($before:tt)*] $part:ident . $($rest:ident).+ ; $code:expr ; $($argument:expr),*) => {
        $crate::foreign!(@code $library, [$($before)* $part .] $($rest).+ ; $code ; $($argument),*)
    };
    (@code $library:ident, [$($table:tt)*] $function:ident ; $code:expr ; $($argument:expr),*) => {
        {
            // cudarc's declaration: the arguments must match it.
            let binding: unsafe fn(_, $($crate::foreign!(@hole $argument)),*) -> _ =
                $crate::device::cudarc::$library::sys::$function;
            $($table)* $function.of_code(binding)($code $(, $argument)*)
        }
    };
}

pub(crate) use foreign;

/// Declares a `struct` with one function per line, and the loading of all of them.
macro_rules! functions {
    ($(#[$meta:meta])* $name:ident { $($function:ident),+ $(,)? }) => {
        $(#[$meta])*
        ///
        /// Each field is the library's function of that name, with the library's own rules.
        #[allow(non_snake_case, missing_docs, unreachable_pub, reason = "a table of foreign names")]
        #[derive(Clone, Copy)]
        pub struct $name {
            $( pub $function: $crate::device::symbols::Symbol, )+
        }

        impl $crate::device::symbols::Functions for $name {
            fn load(library: &libloading::os::unix::Library) -> Result<Self, $crate::device::symbols::Unusable> {
                Ok(Self {
                    $( $function: $crate::device::symbols::Symbol::find(library, stringify!($function))?, )+
                })
            }

            fn address(&self) -> usize {
                [$(self.$function),+][0].address()
            }
        }

        impl std::fmt::Debug for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(stringify!($name))
            }
        }
    };
}
pub(crate) use functions;

/// Returns two digits per byte.
pub(crate) fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// Returns a copy of a text that a library owns.
///
/// # Safety
/// `text` is null or points to a text that ends with a zero and stays unchanged during the call.
pub(crate) unsafe fn text(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: by the caller's promise.
    unsafe { std::ffi::CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

//! Tables of functions of libraries that are found at run time.
//!
//! A table is loaded whole or not at all, so that no call can meet a missing symbol. Handles of the libraries are
//! pointer-sized integers here and status codes plain ones: a library newer than this program may return codes that an
//! enumeration would not know.

use libloading::os::unix::Library;

/// An opaque handle of a library: a pointer that is never looked behind.
pub type Handle = usize;
/// An address in the memory of a GPU.
pub type Address = u64;

/// A table of functions.
pub(crate) trait Table: Sized {
    /// What people call the library.
    const NAME: &'static str;
    /// The oldest version that will do.
    const MINIMUM: Version;

    /// Takes every function from an open library, or says which is missing.
    fn load(library: &Library) -> Result<Self, String>;

    /// Asks the library for its version.
    fn version(&self) -> Result<Version, String>;

    /// The address of any of its functions, to find out which file it came from.
    fn address(&self) -> usize;
}

/// A version of a library: major, minor, patch.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Version(pub u32, pub u32, pub u32);

impl std::fmt::Display for Version {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(&format!("{}.{}.{}", self.0, self.1, self.2))
    }
}

/// `struct` with one function pointer a line, and the loading of all of them.
macro_rules! functions {
    (
        $(#[$meta:meta])*
        $name:ident {
            $( $function:ident ( $($argument:ty),* $(,)? ) -> $result:ty; )+
        }
    ) => {
        $(#[$meta])*
        ///
        /// Each field is the library's function of that name, with the library's own rules.
        #[allow(non_snake_case, missing_docs, unreachable_pub, reason = "a table of foreign names")]
        #[derive(Clone, Copy)]
        pub struct $name {
            $( pub $function: unsafe extern "C" fn($($argument),*) -> $result, )+
        }

        impl $name {
            #[allow(non_snake_case)]
            fn take(library: &libloading::os::unix::Library) -> Result<Self, String> {
                $(
                    // SAFETY: the signature is the one that the library's documentation gives for this name, in every
                    // version from the oldest accepted; the library is never closed, so the pointer stays valid.
                    let $function = unsafe {
                        *library
                            .get::<unsafe extern "C" fn($($argument),*) -> $result>(
                                concat!(stringify!($function), "\0").as_bytes(),
                            )
                            .map_err(|_| format!("it has no function {}", stringify!($function)))?
                    };
                )+
                Ok(Self { $($function),+ })
            }

            fn first_address(&self) -> usize {
                [$(self.$function as usize),+][0]
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

/// Two digits a byte.
pub(crate) fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// Text that a library owns.
///
/// # Safety
/// `text` is null or points to a text that ends with a zero and stays unchanged during the call.
pub(crate) unsafe fn text(text: *const std::ffi::c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: by the caller's promise.
    unsafe { std::ffi::CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

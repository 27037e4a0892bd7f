//! Element types. One table names them; all code that differs by type is expanded from it.

use serde::{Deserialize, Serialize};

/// Calls `$then! { Variant, type, "name"; … }` with every element type.
macro_rules! for_each_dtype {
    ($then:ident) => {
        $then! {
            F32, f32, "f32";
            F64, f64, "f64";
            F16, half::f16, "f16";
            BF16, half::bf16, "bf16";
            I8, i8, "i8";
            U8, u8, "u8";
            I32, i32, "i32";
            U32, u32, "u32";
            I64, i64, "i64";
            U64, u64, "u64";
        }
    };
}

pub(crate) use for_each_dtype;

mod sealed {
    pub trait Sealed {}
}

/// A type whose slices can be sent and reduced. Sealed: the wire format and the kernels support exactly these.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is no element type of a collective",
    note = "the element types are `f32 f64 f16 bf16 i8 u8 i32 u32 i64 u64`, with `f16` and `bf16` of the crate `half`, version 2"
)]
pub trait Element:
    sealed::Sealed + bytemuck::Pod + PartialEq + Send + Sync + std::fmt::Debug + 'static
{
    /// The tag of this type.
    const DTYPE: DType;
}

macro_rules! define {
    ($($variant:ident, $type:ty, $name:literal;)*) => {
        /// The element type of a buffer.
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
        #[serde(rename_all = "lowercase")]
        #[repr(u8)]
        #[allow(missing_docs, reason = "the variants say it all")]
        pub enum DType { $($variant,)* }

        impl DType {
            /// Every element type, in wire order.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// Returns the name used in configuration, tables and JSON.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }

            /// Returns the number of bytes of one element.
            pub const fn size(self) -> usize {
                match self { $(Self::$variant => size_of::<$type>(),)* }
            }

            /// Returns the required alignment of a buffer in bytes.
            pub const fn align(self) -> usize {
                match self { $(Self::$variant => align_of::<$type>(),)* }
            }
        }

        $(
            impl sealed::Sealed for $type {}
            impl Element for $type { const DTYPE: DType = DType::$variant; }
        )*
    };
}
for_each_dtype!(define);

impl DType {
    /// Returns the type with this wire number, if there is one.
    pub fn from_wire(number: u8) -> Option<Self> {
        Self::ALL.get(usize::from(number)).copied()
    }

    /// Returns true if a sum of this type rounds.
    pub const fn is_float(self) -> bool {
        matches!(self, Self::F32 | Self::F64 | Self::F16 | Self::BF16)
    }

    /// Returns true if reductions widen to `f32` in between.
    pub const fn is_half(self) -> bool {
        matches!(self, Self::F16 | Self::BF16)
    }
}

impl std::fmt::Display for DType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

/// Error: no element type has this name.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("unknown element type `{name}`; expected one of {}", names())]
pub struct UnknownDType {
    /// The name.
    pub name: String,
}

fn names() -> String {
    DType::ALL.iter().map(|d| d.name()).collect::<Vec<_>>().join(", ")
}

impl std::str::FromStr for DType {
    type Err = UnknownDType;

    /// Also accepts the names that PyTorch and nccl-tests use, such as `bfloat16` and `half`.
    fn from_str(text: &str) -> Result<Self, UnknownDType> {
        let name = match text {
            "float32" | "float" => "f32",
            "float64" | "double" => "f64",
            "float16" | "half" => "f16",
            "bfloat16" => "bf16",
            "int8" => "i8",
            "uint8" => "u8",
            "int32" | "int" => "i32",
            "uint32" => "u32",
            "int64" | "long" => "i64",
            "uint64" => "u64",
            name => name,
        };
        let found = Self::ALL.iter().copied().find(|dtype| dtype.name() == name);
        found.ok_or_else(|| UnknownDType { name: text.into() })
    }
}

/// Runs `$body` with `$T` bound to the Rust type of a [`DType`].
macro_rules! with_element {
    ($dtype:expr, $T:ident => $body:expr) => {
        $crate::types::dtype::with_element! { @ $dtype, $T => $body;
            F32 f32, F64 f64, F16 half::f16, BF16 half::bf16, I8 i8, U8 u8, I32 i32, U32 u32, I64 i64, U64 u64
        }
    };
    (@ $dtype:expr, $T:ident => $body:expr; $($variant:ident $type:ty),*) => {
        match $dtype {
            $($crate::types::dtype::DType::$variant => {
                type $T = $type;
                $body
            })*
        }
    };
}
pub(crate) use with_element;

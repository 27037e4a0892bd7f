//! The sections, one per file. Fields, defaults and descriptions are each written once.

mod device;
mod job;
mod launch;
mod layout;
mod log;
mod metrics;
mod model;
mod nccl;
mod otlp;
mod process_group;
mod profile;
mod rendezvous;
mod security;
mod tcp;

pub use device::DeviceConfig;
pub use job::JobConfig;
pub use launch::LaunchConfig;
pub use layout::LayoutConfig;
pub use log::LogConfig;
pub use metrics::MetricsConfig;
pub use model::ModelConfig;
pub use nccl::NcclConfig;
pub use otlp::OtlpConfig;
pub use process_group::ProcessGroupConfig;
pub use profile::ProfileConfig;
pub use rendezvous::RendezvousConfig;
pub use security::SecurityConfig;
pub use tcp::TcpConfig;

use crate::ValueError;

/// A section of settings, for loading and display.
pub(crate) trait Section {
    /// Returns the values as text, in the order of the keys in `INFO`.
    fn values(&self) -> Vec<String>;

    /// Parses `text` into the setting with this dotted key. Returns `None` if the key is not in this section.
    fn set(&mut self, key: &str, text: &str) -> Option<Result<(), ValueError>>;
}

/// Generates from one list of `field: Type = "default"`: the struct, its `Default`, and its rows of the key table.
///
/// Defaults are text in the users' syntax, so the documentation shows exactly the text that is parsed.
macro_rules! section {
    (
        $(#[doc = $section_doc:literal])+
        $type:ident = $name:literal {
            $( $(#[doc = $doc:literal])+ $field:ident: $kind:ty = $default:literal, )+
            $( [ $(#[doc = $inner_doc:literal])+ $inner:ident: $inner_type:ty ] )?
        }
    ) => {
        $(#[doc = $section_doc])+
        #[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
        #[serde(default, deny_unknown_fields)]
        pub struct $type {
            $(
                $(#[doc = $doc])+
                #[doc = concat!("\n\nDefault: `\"", $default, "\"`.")]
                #[serde(with = "crate::setting::as_setting")]
                pub $field: $kind,
            )+
            $( $(#[doc = $inner_doc])+ pub $inner: $inner_type, )?
        }

        impl Default for $type {
            fn default() -> Self {
                Self {
                    $( $field: crate::setting::built_in($default), )+
                    $( $inner: <$inner_type>::default(), )?
                }
            }
        }

        impl $type {
            pub(crate) const INFO: crate::SectionInfo = crate::SectionInfo {
                name: $name,
                doc: concat!($($section_doc),+).trim_ascii(),
                keys: &[$(crate::KeyInfo {
                    key: concat!($name, ".", stringify!($field)),
                    default: $default,
                    doc: concat!($($doc),+).trim_ascii(),
                    expected: <$kind as crate::setting::Setting>::EXPECTED,
                    example: <$kind as crate::setting::Setting>::EXAMPLE,
                    is_table: <$kind as crate::setting::Setting>::IS_TABLE,
                }),+],
            };
        }

        impl crate::sections::Section for $type {
            fn values(&self) -> Vec<String> {
                vec![$(crate::setting::Setting::show(&self.$field)),+]
            }

            fn set(&mut self, key: &str, text: &str) -> Option<Result<(), crate::ValueError>> {
                match key {
                    $(concat!($name, ".", stringify!($field)) => {
                        Some(crate::setting::Setting::parse(text).map(|value| self.$field = value))
                    })+
                    _ => None,
                }
            }
        }
    };
}
use section;

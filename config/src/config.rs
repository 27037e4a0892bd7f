//! The whole configuration.

use crate::keys::{SectionInfo, keys};
use crate::sections::Section;
use crate::{
    DeviceConfig, Entry, JobConfig, LaunchConfig, LayoutConfig, LogConfig, MetricsConfig, ModelConfig,
    NcclConfig, OtlpConfig, ProcessGroupConfig, ProfileConfig, Provenance, RendezvousConfig, SecurityConfig,
    Source, TcpConfig, ValueError,
};

/// All settings.
///
/// Comes from [`Config::load`], or from [`Config::default`] and assignments. It needs no further validation.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Config {
    /// `[job]`
    pub job: JobConfig,
    /// `[launch]`
    pub launch: LaunchConfig,
    /// `[rendezvous]`
    pub rendezvous: RendezvousConfig,
    /// `[security]`
    pub security: SecurityConfig,
    /// `[process_group]`
    pub process_group: ProcessGroupConfig,
    /// `[device]`
    pub device: DeviceConfig,
    /// `[nccl]`
    pub nccl: NcclConfig,
    /// `[layout]`
    pub layout: LayoutConfig,
    /// `[profile]`
    pub profile: ProfileConfig,
    /// `[log]`
    pub log: LogConfig,
    /// `[metrics]`
    pub metrics: MetricsConfig,
    /// `[otlp]`
    pub otlp: OtlpConfig,
    /// `[model]`
    pub model: ModelConfig,
    /// Sources of the values; see [`Config::source_of`].
    pub provenance: Provenance,
}

macro_rules! listed {
    ($($section:ident $(. $inner:ident)?: $kind:ty,)+) => {
        /// All sections with their settings.
        pub const SECTIONS: &[SectionInfo] = &[$(<$kind>::INFO),+];

        impl Config {
            fn sections(&self) -> [&dyn Section; SECTIONS.len()] {
                [$(&self.$section $(.$inner)?),+]
            }

            /// Parses `text` into the setting `key`, which must exist.
            pub(crate) fn set(&mut self, key: &str, text: &str) -> Result<(), ValueError> {
                $(if let Some(outcome) = self.$section $(.$inner)?.set(key, text) {
                    return outcome;
                })+
                unreachable!("`{key}` is not a setting")
            }
        }
    };
}

listed! {
    job: JobConfig,
    launch: LaunchConfig,
    rendezvous: RendezvousConfig,
    security: SecurityConfig,
    process_group: ProcessGroupConfig,
    process_group.tcp: TcpConfig,
    device: DeviceConfig,
    nccl: NcclConfig,
    layout: LayoutConfig,
    profile: ProfileConfig,
    log: LogConfig,
    metrics: MetricsConfig,
    otlp: OtlpConfig,
    model: ModelConfig,
}

impl Config {
    /// Returns every setting with its value and source, in the order of [`SECTIONS`].
    #[doc(hidden)]
    pub fn entries(&self) -> Vec<Entry> {
        let values = self.sections().into_iter().flat_map(Section::values);
        keys()
            .zip(values)
            .map(|(key, value)| Entry {
                key: key.key,
                source: self.provenance.of(key.key, &value, key.default),
                value,
            })
            .collect()
    }

    /// Returns the value of a setting as text.
    pub(crate) fn value(&self, key: &str) -> String {
        let value = self.entries().into_iter().find(|entry| entry.key == key).map(|entry| entry.value);
        value.unwrap_or_else(|| unreachable!("`{key}` is not a setting"))
    }

    /// Returns the source of the value of a dotted key, or `None` if there is no such key.
    ///
    /// A field assigned after loading has the source [`Source::Code`] if its value differs from the loaded one.
    pub fn source_of(&self, key: &str) -> Option<Source> {
        self.entries().into_iter().find(|entry| entry.key == key).map(|entry| entry.source)
    }
}

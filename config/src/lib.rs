//! The settings of Ryzanstein, and the source of each value.
//!
//! Start at [`Config::load`]. It merges four layers, each stronger than the one before: the defaults, a TOML file, the environment,
//! the command line; an application may set values on top of them. It parses each effective value once, into types that need no
//! later validation.
//!
//! This crate does not read the environment, working directory or arguments of the process: the caller passes them as
//! [`Sources`]. Loading reads one file, the TOML file that the sources name. Other crates read and replace files through
//! [`mod@file`].
//!
//! ```
//! use ryzanstein_config::{BackendChoice, Config, Source, Sources};
//!
//! let config = Config::load(&Sources {
//!     environment: vec![("RYZ_PROCESS_GROUP__TIMEOUT".into(), "30s".into())],
//!     flags: vec![("process_group.backend".into(), "tcp".into(), "--backend".into())],
//!     ..Sources::default()
//! })?;
//! assert_eq!(config.process_group.timeout.get().as_secs(), 30);
//! assert_eq!(config.process_group.backend, BackendChoice::Tcp);
//! assert_eq!(config.source_of("process_group.backend"), Some(Source::Flag("--backend".into())));
//! assert_eq!(config.source_of("log.level"), Some(Source::Default));
//! # Ok::<(), ryzanstein_config::ConfigError>(())
//! ```
//!
//! An application may also build its configuration in code:
//!
//! ```
//! use ryzanstein_config::{BackendChoice, Config, ProcessGroupConfig, Timeout};
//!
//! let config = Config {
//!     process_group: ProcessGroupConfig {
//!         backend: BackendChoice::Tcp,
//!         timeout: Timeout::from_secs(30),
//!         ..ProcessGroupConfig::default()
//!     },
//!     ..Config::default()
//! };
//! assert_eq!(config.source_of("process_group.timeout"), Some(ryzanstein_config::Source::Code));
//! ```

mod bounded;
mod choice;
mod config;
mod duration;
mod error;
#[doc(hidden)]
pub mod file;
mod host_port;
mod keys;
mod load;
#[doc(hidden)]
pub mod nccl;
mod sections;
mod setting;
mod shown_ranks;
mod size;
mod source;
mod tuning;

pub use bounded::{Fraction, MessageSize, RecordedCalls, Temperature, Timeout, WorldSize};
pub use choice::{
    BackendChoice, BindChoice, EncryptionChoice, InstructionSet, LauncherChoice, LogFormat, ModelDType,
    NcclProfile, Numerics,
};
pub use config::Config;
#[doc(hidden)]
pub use config::SECTIONS;
pub use error::{ConfigError, ValueError};
pub use file::FileError;
pub use host_port::HostPort;
#[doc(hidden)]
pub use keys::{KeyInfo, SectionInfo, keys};
pub use load::{RESERVED_ENVIRONMENT, Sources};
pub use nccl::NcclEnv;
pub use sections::{
    DeviceConfig, JobConfig, LaunchConfig, LayoutConfig, LogConfig, MetricsConfig, ModelConfig, NcclConfig,
    OtlpConfig, ProcessGroupConfig, ProfileConfig, RendezvousConfig, SecurityConfig, TcpConfig,
};
pub use shown_ranks::ShownRanks;
pub use size::ByteSize;
pub use source::Source;
#[doc(hidden)]
pub use source::{Entry, Provenance};
pub use tuning::TuningChoice;

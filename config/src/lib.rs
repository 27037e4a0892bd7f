//! What a Ryzanstein user may set, and where each value came from.
//!
//! Four layers, each stronger than the one before: the defaults, a TOML file, the environment, the command line.
//! [`Config::load`] puts them together and parses every value once, into types that leave nothing to check later.
//!
//! Absent from this crate: the process's environment, its working directory and its arguments. The caller hands them
//! over as [`Sources`]; reading the file named there is the only I/O.
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
//! An embedding program may as well write its configuration by hand:
//!
//! ```
//! use ryzanstein_config::{BackendChoice, Config, ProcessGroupConfig, Timeout};
//!
//! let config = Config {
//!     process_group: ProcessGroupConfig {
//!         backend: BackendChoice::Loopback,
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
mod host_port;
mod keys;
mod load;
mod sections;
mod setting;
mod size;
mod source;

pub use bounded::{Fraction, Segment, Temperature, Timeout, TopP, WorldSize};
pub use choice::{AlgorithmChoice, BackendChoice, LogFormat, ModelDType};
pub use config::{Config, SECTIONS};
pub use error::{ConfigError, ValueError};
pub use host_port::HostPort;
pub use keys::{KeyInfo, SectionInfo, keys};
pub use load::{RESERVED_ENVIRONMENT, Sources};
pub use sections::{
    DeviceConfig, JobConfig, LaunchConfig, LayoutConfig, LogConfig, MetricsConfig, ModelConfig,
    ProcessGroupConfig, ProfileConfig, RendezvousConfig, TcpConfig,
};
pub use size::ByteSize;
pub use source::{Entry, Provenance, Source};

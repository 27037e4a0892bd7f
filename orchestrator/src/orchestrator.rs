//! The facade for embedding: one rank of a job inside another program's process.
//!
//! It installs no signal handler or logger, and never ends the process. Only a [`Builder`] without an environment reads that
//! of the process.

use std::error::Error as StdError;
use std::path::{Path, PathBuf};

use ryzanstein_config::{Config, Sources};
use ryzanstein_process_group::device::{Device, LibrarySearch};
use ryzanstein_process_group::{
    BackendKind, DType, Error, MemoryRendezvous, ProcessGroup, ProcessGroupManager,
};
use ryzanstein_tensor_parallel::compute::instruction_set;
use ryzanstein_tensor_parallel::{Llama, TextModel};

use crate::heartbeat::Heartbeat;
use crate::nccl_settings;
use crate::rendezvous::{self, Connection, Environment};

/// One rank's part of a job: its rendezvous and its process groups.
///
/// ```no_run
/// use ryzanstein_orchestrator::prelude::*;
///
/// # fn main() -> Result<(), ryzanstein_orchestrator::process_group::Error> {
/// let mut orchestrator = Orchestrator::builder().initialize()?;
/// let group = orchestrator.tensor_parallel();
/// let mut x = group.upload(&[1.0f32; 1000])?;
/// group.all_reduce(&mut x, ReduceOp::Sum)?;
/// println!("{:?}", group.download(&x)?);
/// orchestrator.finalize()
/// # }
/// ```
#[derive(Debug)]
pub struct Orchestrator {
    config: Config,
    // Dropped before the connection: a rank that serves the rendezvous must continue to do so until its groups have left.
    manager: ProcessGroupManager,
    // Runs until the groups have left, over the connection.
    heartbeat: Option<Heartbeat>,
    connection: Connection,
}

/// Configures how a rank joins: settings, environment, rendezvous and device.
///
/// ```
/// use ryzanstein_orchestrator::prelude::*;
///
/// // Two ranks as threads. Ranks that are processes leave `rendezvous` out.
/// std::thread::scope(|scope| {
///     for rendezvous in MemoryRendezvous::new(2) {
///         scope.spawn(move || {
///             let builder = Orchestrator::builder().set("process_group.backend", "tcp");
///             let mut rank = builder.rendezvous(rendezvous).initialize().unwrap();
///             let mut x = vec![1.0f32; 10];
///             rank.tensor_parallel().all_reduce(&mut x, ReduceOp::Sum).unwrap();
///             assert_eq!(x, [2.0; 10]);
///             rank.finalize().unwrap();
///         });
///     }
/// });
/// ```
#[derive(Debug, Default)]
#[must_use = "nothing happens before `initialize`"]
pub struct Builder {
    config: Option<Config>,
    set: Vec<(String, String)>,
    environment: Option<Environment>,
    rendezvous: Option<MemoryRendezvous>,
    device: Option<Device>,
}

impl Builder {
    /// Uses this configuration instead of a file and the environment.
    pub fn config(self, config: Config) -> Self {
        Self { config: Some(config), ..self }
    }

    /// Overrides one setting, given by its dotted key. The value is written as in a variable, such as `30s`.
    pub fn set(mut self, key: &str, value: impl Into<String>) -> Self {
        self.set.push((key.into(), value.into()));
        self
    }

    /// Uses these variables instead of the environment of the process.
    pub fn environment(self, environment: Environment) -> Self {
        Self { environment: Some(environment), ..self }
    }

    /// Joins the other ranks of this process, which are threads.
    pub fn rendezvous(self, rendezvous: MemoryRendezvous) -> Self {
        Self { rendezvous: Some(rendezvous), ..self }
    }

    /// Uses a GPU that the caller has opened or [taken over](Device::from_cudarc), on its stream.
    pub fn device(self, device: &Device) -> Self {
        Self { device: Some(device.clone()), ..self }
    }

    /// Reads the settings, finds the other ranks, joins them and creates the process groups.
    ///
    /// # Errors
    /// [`Error::Configuration`] for wrong settings; otherwise the errors of [`Orchestrator::initialize`].
    pub fn initialize(self) -> Result<Orchestrator, Error> {
        let Self { config, set, environment, rendezvous, device } = self;
        // Of this process, as it is, because the path of a file need not be text.
        let file = match &environment {
            Some(given) => given.get("RYZ_CONFIG").map(PathBuf::from),
            None => std::env::var_os("RYZ_CONFIG").map(PathBuf::from),
        };
        let environment = environment.unwrap_or_else(rendezvous::process_environment);
        let config = match config {
            Some(config) if set.is_empty() => config,
            Some(_) => {
                return Err(Error::Configuration(
                    "Builder: `config` takes a whole configuration as it is; set its fields instead of `set`, or leave `config` out"
                        .into(),
                ));
            }
            None => {
                let flags = set.into_iter().map(|(key, value)| (key, value, "Builder::set".into())).collect();
                let variables =
                    environment.iter().map(|(name, value)| (name.clone(), value.clone())).collect();
                let sources = Sources { file, default_file: None, environment: variables, flags };
                Config::load(&sources).map_err(|error| Error::Configuration(error.to_string()))?
            }
        };
        let connection = match rendezvous {
            Some(memory) => memory.into(),
            None => rendezvous::connect(&config, &environment)?,
        };
        Orchestrator::join(config, &environment, connection, device.as_ref())
    }
}

/// Applies the settings that matter only on this backend: `[nccl]` on NCCL, `model.instruction_set` on CPUs.
fn apply_for(backend: BackendKind, config: &Config, environment: &Environment) -> Result<(), Error> {
    if backend == BackendKind::Nccl {
        return nccl_settings::require(config, environment);
    }
    let chosen = config.model.instruction_set.map_or(Ok(()), instruction_set::choose);
    chosen.map_err(|error| Error::Configuration(format!("model.instruction_set: {error}")))
}

impl Orchestrator {
    /// Returns a builder, which configures how this rank joins.
    pub fn builder() -> Builder {
        Builder::default()
    }

    /// Finds the rendezvous from the environment, joins the job and creates the process groups.
    ///
    /// # Errors
    /// Returns the errors of [`rendezvous::connect`] and [`ProcessGroupManager::initialize`]; [`Error::Configuration`] when the
    /// job runs on NCCL and `environment` lacks variables that `[nccl]` requires, see [`nccl_settings`], or when it runs on
    /// CPUs and this process cannot use `model.instruction_set`, see [`instruction_set::choose`]. The error is reported to the
    /// launcher.
    pub fn initialize(config: &Config, environment: &Environment) -> Result<Self, Error> {
        Self::join(config.clone(), environment, rendezvous::connect(config, environment)?, None)
    }

    fn join(
        config: Config,
        environment: &Environment,
        connection: Connection,
        device: Option<&Device>,
    ) -> Result<Self, Error> {
        let initialized = if let Some(device) = device {
            ProcessGroupManager::initialize_on(&config, &connection, device)
        } else {
            let search = LibrarySearch::from_variables(|name| environment.get(name).cloned());
            ProcessGroupManager::initialize_with(&config, &connection, &search)
        };
        let initialized = initialized.and_then(|manager| {
            // The backend is known only now.
            apply_for(manager.backend(), &config, environment)?;
            Ok(manager)
        });
        match initialized {
            Ok(mut manager) => {
                // Only our own launcher receives heartbeats.
                let launcher = connection.launcher().filter(|_| environment.contains_key("RYZ_RENDEZVOUS"));
                let heartbeat = launcher.and_then(|launcher| {
                    let (flight, ranks) = (manager.flight_recorder(), manager.roster().world_size());
                    Heartbeat::start(launcher, ranks, flight, manager.tensor_parallel().device())
                });
                Ok(Self { config, manager, heartbeat, connection })
            }
            Err(error) => {
                connection.report_failure(&error, None);
                Err(error)
            }
        }
    }

    /// Returns the settings that this rank joined with.
    pub const fn config(&self) -> &Config {
        &self.config
    }

    /// Returns the process groups.
    pub fn manager(&mut self) -> &mut ProcessGroupManager {
        &mut self.manager
    }

    /// Returns the tensor-parallel group: the ranks that share each layer.
    pub fn tensor_parallel(&mut self) -> &mut ProcessGroup {
        self.manager.tensor_parallel()
    }

    /// Loads this rank's shard of a Llama-architecture model from a Hugging Face folder, as the layout divides it; see
    /// [`Llama::load`]. With pipeline stages, pass the [`manager`](Self::manager) to the model's calls; otherwise
    /// [`tensor_parallel`](Self::tensor_parallel) serves as well.
    ///
    /// # Errors
    /// Returns the errors of [`Llama::load`].
    pub fn load_model(
        &mut self,
        directory: &Path,
        dtype: Option<DType>,
    ) -> Result<Llama, ryzanstein_tensor_parallel::Error> {
        Llama::load(directory, dtype, &mut self.manager)
    }

    /// Loads a model as [`load_model`](Self::load_model) does, with its tokenizer and chat template.
    ///
    /// # Errors
    /// Returns the errors of [`TextModel::load`].
    pub fn load_text_model(
        &mut self,
        directory: &Path,
        dtype: Option<DType>,
    ) -> Result<TextModel, ryzanstein_tensor_parallel::Error> {
        TextModel::load(directory, dtype, &mut self.manager)
    }

    /// Reports to the launcher, if there is one, the reason why this rank gives up, and its last collective. Returns true if the
    /// launcher knows the reason now. Then writes the flight record, if `profile.trace_dir` names a folder and the error is the
    /// program's own: a group that fails writes it itself.
    pub fn report(&self, error: &(dyn StdError + 'static)) -> bool {
        use ryzanstein_tensor_parallel::Error as ModelError;
        let last_call = self.manager.last_call();
        let last_call = last_call.as_deref();
        let (mut cause, mut caused_by) = (Some(error), None);
        while let Some(current) = cause {
            // The model's error is transparent over the group's, so the group's is not in the chain of sources.
            let inside = match current.downcast_ref() {
                Some(ModelError::Group(inner)) => Some(inner),
                Some(ModelError::Peer { rank, .. }) => {
                    caused_by = Some(*rank);
                    break;
                }
                _ => current.downcast_ref::<Error>(),
            };
            if let Some(group_error) = inside {
                return self.connection.report_failure(group_error, last_call);
            }
            cause = current.source();
        }
        let is_known = self.connection.report(&crate::chain(error), last_call, caused_by);
        self.manager.flight_recorder().failed();
        is_known
    }

    /// Tells the launcher, if there is one, and the other ranks that the program has panicked on this rank, with the panic's
    /// message. An uncaught panic is reported when this value is dropped, without the message.
    pub fn report_panic(&self, message: &str) {
        // The launcher first, so that it does not learn of the panic from the others.
        self.connection.report_failure(&Error::Panicked(message.into()), self.manager.last_call().as_deref());
        self.manager.panicked(message);
    }

    /// Leaves the job. Reports an error to the launcher, if there is one. See [`ProcessGroupManager::finalize`].
    ///
    /// # Errors
    /// Returns the errors of [`ProcessGroupManager::finalize`].
    pub fn finalize(self) -> Result<(), Error> {
        let Self { manager, heartbeat, connection, .. } = self;
        let last_call = manager.last_call();
        let outcome = manager.finalize();
        drop(heartbeat);
        outcome.inspect_err(|error| {
            connection.report_failure(error, last_call.as_deref());
        })
    }
}

#[cfg(test)]
mod tests {
    use ryzanstein_config::InstructionSet;

    use super::*;

    fn lacking() -> InstructionSet {
        let supported = instruction_set::supported();
        *InstructionSet::ALL.iter().find(|set| !supported.contains(set)).expect("one of another architecture")
    }

    #[test]
    fn a_rank_on_a_cpu_that_lacks_the_instruction_set_does_not_join() {
        let set = lacking();
        let builder = Orchestrator::builder()
            .environment(Environment::new())
            .set("process_group.backend", "tcp")
            .set("model.instruction_set", set.name());
        let rendezvous = MemoryRendezvous::new(1).remove(0);
        let error = builder.rendezvous(rendezvous).initialize().expect_err("refused").to_string();
        let start = format!("configuration: model.instruction_set: {set}: this processor lacks it");
        assert!(error.starts_with(&start), "{error}");
    }

    #[test]
    fn an_instruction_set_matters_on_cpus_alone() {
        let mut config = Config::default();
        config.model.instruction_set = Some(lacking());
        assert!(apply_for(BackendKind::Tcp, &config, &Environment::new()).is_err());
        assert!(apply_for(BackendKind::Nccl, &config, &Environment::new()).is_ok());
    }
}

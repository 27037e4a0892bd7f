//! The facade for embedding: one rank of a job inside another program's process.
//!
//! It has no global effects: no signal handler, logger or process exit, and it reads no variables. The caller passes the
//! environment.

use std::error::Error as StdError;
use std::path::Path;

use ryzanstein_config::Config;
use ryzanstein_process_group::device::Surroundings;
use ryzanstein_process_group::{BackendKind, DType, Error, ProcessGroup, ProcessGroupManager};
use ryzanstein_tensor_parallel::Llama;

use crate::nccl_settings;
use crate::rendezvous::{self, Connection, Environment};

/// One rank's part of a job: its rendezvous and its process groups.
///
/// ```no_run
/// use ryzanstein_config::Config;
/// use ryzanstein_orchestrator::Orchestrator;
/// use ryzanstein_process_group::ReduceOp;
///
/// # fn main() -> Result<(), ryzanstein_process_group::Error> {
/// let mut orchestrator = Orchestrator::initialize(&Config::default(), &std::env::vars().collect())?;
/// let group = orchestrator.tensor_parallel();
/// let mut x = group.upload(&[1.0f32; 1000])?;
/// group.all_reduce(&mut x, ReduceOp::Sum)?;
/// println!("{:?}", group.download(&x)?);
/// orchestrator.finalize()
/// # }
/// ```
#[derive(Debug)]
pub struct Orchestrator {
    // Dropped before the connection: a rank that serves the rendezvous must do so until its groups have left.
    manager: ProcessGroupManager,
    connection: Connection,
}

impl Orchestrator {
    /// Finds the rendezvous from the environment, joins the job and creates the process groups.
    ///
    /// # Errors
    /// As [`rendezvous::connect`] and [`ProcessGroupManager::initialize`]; [`Error::Configuration`] when the job runs on
    /// NCCL and `environment` lacks variables that `[nccl]` requires, see [`nccl_settings`]. The error is reported to the
    /// launcher.
    pub fn initialize(config: &Config, environment: &Environment) -> Result<Self, Error> {
        let connection = rendezvous::connect(config, environment)?;
        let surroundings = Surroundings::from_variables(|name| environment.get(name).cloned());
        let initialized =
            ProcessGroupManager::initialize_with(config, &connection, &surroundings).and_then(|manager| {
                // The backend is known only now, and without NCCL its settings do not matter.
                if manager.backend() == BackendKind::Nccl {
                    nccl_settings::require(config, environment)?;
                }
                Ok(manager)
            });
        match initialized {
            Ok(manager) => Ok(Self { manager, connection }),
            Err(error) => {
                connection.report_failure(&error, None);
                Err(error)
            }
        }
    }

    /// The process groups.
    pub fn manager(&mut self) -> &mut ProcessGroupManager {
        &mut self.manager
    }

    /// The tensor-parallel group: the ranks that share each layer.
    pub fn tensor_parallel(&mut self) -> &mut ProcessGroup {
        self.manager.tensor_parallel()
    }

    /// Loads this rank's shard of a Llama-architecture model from a Hugging Face folder; see [`Llama::load`].
    ///
    /// # Errors
    /// As [`Llama::load`].
    pub fn load_model(
        &mut self,
        directory: &Path,
        dtype: Option<DType>,
    ) -> Result<Llama, ryzanstein_tensor_parallel::Error> {
        Llama::load(directory, dtype, self.manager.tensor_parallel())
    }

    /// Reports to the launcher, if there is one, why this rank gives up, and in which collective.
    pub fn report(&self, error: &(dyn StdError + 'static)) {
        use ryzanstein_tensor_parallel::Error as ModelError;
        let mut cause = Some(error);
        while let Some(current) = cause {
            // The model's error is transparent over the group's, so the group's is not in the chain of sources.
            let inside = match current.downcast_ref() {
                Some(ModelError::Group(inner)) => Some(inner),
                Some(ModelError::Peer { rank, .. }) => {
                    return self.connection.report(&error.to_string(), Some(*rank));
                }
                _ => current.downcast_ref::<Error>(),
            };
            if let Some(group_error) = inside {
                return self.connection.report_failure(group_error, self.manager.last_call().as_deref());
            }
            cause = current.source();
        }
        self.connection.report(&error.to_string(), None);
    }

    /// Tells the launcher, if there is one, and the other ranks that the program has panicked on this rank, with the panic's
    /// message. A panic that nobody catches is told when this value is dropped, without the message.
    pub fn report_panic(&self, message: &str) {
        // The launcher first, so that it does not hear of it from the others.
        self.connection.report_failure(&Error::Panicked(message.into()), self.manager.last_call().as_deref());
        self.manager.panicked(message);
    }

    /// Leaves the job. Reports an error to the launcher, if there is one. See [`ProcessGroupManager::finalize`].
    ///
    /// # Errors
    /// As there.
    pub fn finalize(self) -> Result<(), Error> {
        let Self { manager, connection, .. } = self;
        let last_call = manager.last_call();
        manager.finalize().inspect_err(|error| connection.report_failure(error, last_call.as_deref()))
    }
}

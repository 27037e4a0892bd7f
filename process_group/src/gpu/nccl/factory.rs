//! Checks whether a rank can use NCCL, and makes the groups that use it.

use std::sync::Arc;

use super::{CommInit, NcclComm, Sharing, connect};
use crate::device::nvml::Nvml;
use crate::device::symbols::Table;
use crate::device::{Device, DeviceError, Libraries, Nccl, Version};
use crate::error::{Error, Result};
use crate::factory::{AnyBackend, BackendFactory, GroupSpec, ProbeContext, Together};
use crate::link::mesh::Unconnected;
use crate::membership::capability::{Capability, ComponentVersion, Exclusive};
use crate::stream::{self, GroupMembers};
use crate::types::backend_kind::BackendKind;
use crate::types::rank::LocalRank;

/// Takes a GPU for this rank, and makes its groups.
#[derive(Default)]
pub(crate) struct Factory {
    gpu: Option<Gpu>,
    /// The communicators from which those of the layout's groups are split.
    world: Option<Arc<NcclComm>>,
}

/// A GPU and the library, ready for use.
struct Gpu {
    device: Device,
    nccl: Nccl,
    version: Version,
    /// Total bandwidth of its NVLinks in one direction, in 10⁹ bytes per second, according to NVML.
    link_gbs: Option<f64>,
}

/// The reason why this rank cannot use NCCL, in words that are the same on all ranks with that reason: the code that reports it
/// adds the ranks.
#[derive(Debug, thiserror::Error)]
enum Obstacle {
    #[error(transparent)]
    Library(#[from] crate::device::Missing),
    #[error(
        "this rank is given its position on its host only when it joins, and its GPU goes by that position: start it with \
         LOCAL_RANK, as `ryz launch` does"
    )]
    NoLocalRank,
    #[error("ranks watch each other over links of their own next to NCCL: {0}")]
    DoesNotListen(Error),
    #[error("each rank of a host needs a GPU, and CUDA shows {}", DeviceError::shown(*.0))]
    NoDevice(u32),
    #[error(transparent)]
    Device(DeviceError),
}

impl Obstacle {
    /// Returns a short description.
    fn summary(&self) -> &'static str {
        match self {
            Self::Library(missing) if missing.library == <Nccl as Table>::NAME => "NCCL was not found",
            Self::Library(_) | Self::NoDevice(0) => "no GPU here",
            Self::NoLocalRank => "LOCAL_RANK is not set",
            Self::DoesNotListen(_) => "this rank cannot listen",
            Self::NoDevice(_) => "fewer GPUs than ranks",
            Self::Device(_) => "the GPU cannot be used",
        }
    }
}

fn take_gpu(context: &ProbeContext<'_>) -> Result<Gpu, Obstacle> {
    let libraries = match context.device {
        Some(device) => Arc::clone(device.libraries()),
        None => Arc::new(Libraries::find(&context.config.device, context.search)),
    };
    libraries.driver.as_ref().map_err(Clone::clone)?;
    let nccl = libraries.nccl.as_ref().map_err(Clone::clone)?;
    let device = if let Some(device) = context.device {
        context.listens.clone().map_err(Obstacle::DoesNotListen)?;
        device.clone()
    } else {
        // The only GPU that a rank sees is its own, whatever the rank's position on its host.
        let sees_one = libraries.device_count().is_ok_and(|count| count == 1);
        let local_rank =
            context.local_rank.or(sees_one.then_some(LocalRank(0))).ok_or(Obstacle::NoLocalRank)?;
        context.listens.clone().map_err(Obstacle::DoesNotListen)?;
        let opened = Device::open(&libraries, local_rank, &context.config.device);
        opened.map_err(|error| match error {
            DeviceError::NoDevice { count, .. } => Obstacle::NoDevice(count),
            other => Obstacle::Device(other),
        })?
    };
    tracing::debug!(
        gpu = device.info().name,
        uuid = device.info().uuid,
        nccl = %nccl.version,
        path = %nccl.path.display(),
        origin = %nccl.origin,
        "this rank can use NCCL"
    );
    let link_gbs = rated(&device.info().uuid);
    Ok(Gpu { device, nccl: nccl.functions, version: nccl.version, link_gbs })
}

/// Returns the rated bandwidth. Only a column of the profile depends on it: a missing value is no error.
fn rated(uuid: &str) -> Option<f64> {
    let gpu = Nvml::open().ok()?.gpu(uuid)?;
    gpu.nvlink_gbs.map(|each| each * f64::from(gpu.nvlinks)).filter(|all| *all > 0.0)
}

impl Gpu {
    /// Returns the facts that the other ranks need to know of it.
    fn capability(&self) -> Capability {
        let info = self.device.info();
        Capability {
            exclusive: Some(Exclusive {
                id: info.uuid.clone(),
                name: format!("one GPU, the {} {}", info.name, info.uuid),
                rule: "NCCL needs one for each rank; start at most as many ranks as there are GPUs, each with its own \
                       LOCAL_RANK, or show each rank a GPU of its own in CUDA_VISIBLE_DEVICES"
                    .into(),
            }),
            version: Some(ComponentVersion {
                component: "NCCL".into(),
                version: self.version.to_string(),
                rule: "NCCL lets only ranks of exactly the same version together; install one everywhere, or set device.nccl"
                    .into(),
            }),
            ..Capability::usable(BackendKind::Nccl)
        }
    }
}

impl BackendFactory for Factory {
    fn kind(&self) -> BackendKind {
        BackendKind::Nccl
    }

    fn probe(&mut self, context: &ProbeContext<'_>) -> Capability {
        match take_gpu(context) {
            Ok(gpu) => self.gpu.insert(gpu).capability(),
            Err(obstacle) => {
                Capability::unusable(BackendKind::Nccl, obstacle.summary(), obstacle.to_string())
            }
        }
    }

    fn connect(&mut self, group: &GroupSpec<'_>) -> Result<AnyBackend> {
        let Some(gpu) = &self.gpu else {
            return Err(Error::BackendUnavailable {
                backend: BackendKind::Nccl.name().into(),
                reason: "it was selected, but this rank has said that it cannot".into(),
            });
        };
        let init = match (&self.world, group.together) {
            // A communicator can be split off that of the world.
            (Some(world), Together::Everybody(kind)) => {
                // Before the members connect: otherwise members that wait for a missing one would be missing here too.
                world.gather(&**group.store, kind, group.name, group.deadline)?;
                CommInit::Split(world, group.members[0].rank.0, group.rank.0)
            }
            _ => CommInit::Id(&**group.store),
        };
        let channels = match group.connect() {
            Ok(connections) => connections.into_slots(),
            Err(unconnected) => {
                let Unconnected { error, connections } = *unconnected;
                // The reason that another rank has reported to all ranks is more specific than its loss.
                let told = self.world.as_ref().and_then(|world| world.check().err());
                let error = told.unwrap_or(error);
                stream::decline(connections, &error);
                return Err(error);
            }
        };
        let members = GroupMembers {
            group: group.name.into(),
            all: group.members.iter().map(|member| (*member).clone()).collect(),
            position: group.rank.index(),
        };
        let is_wanted = group.config.process_group.peer_memory;
        let sharing = Sharing { store: &**group.store, is_wanted, tuned: group.tuned };
        let (backend, comm) = connect(
            gpu.nccl,
            &gpu.device,
            members,
            channels,
            (&init, sharing, gpu.link_gbs),
            group.deadline,
        )?;
        self.world.get_or_insert(comm);
        Ok(AnyBackend::Stream(Box::new(backend)))
    }
}

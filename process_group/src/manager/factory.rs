//! Groups, made one after another.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ryzanstein_config::{AlgorithmChoice, Config};

use crate::backend::Backend;
use crate::backend::StreamBackend;
use crate::backend::host::{self, Host};
use crate::backend::nccl::{self, CommInit, NcclComm};
use crate::backend::stream::{self, Instruments, Membership as Members};
use crate::error::{Error, Result};
use crate::gpu;
use crate::group::{GroupInfo, ProcessGroup};
use crate::mesh::{Connection, Mesh, Unconnected};
use crate::profile::Recording;
use crate::rank::Rank;
use crate::rendezvous::Membership;
use crate::roster::{BackendKind, Member};
use crate::schedule::Algorithm;
use crate::self_check;

/// Everything that making one more group needs.
pub(super) struct Factory {
    pub(super) config: Config,
    pub(super) membership: Membership,
    pub(super) mesh: Option<Mesh>,
    pub(super) gpu: Option<gpu::Ready>,
    /// What the communicators of the layout's groups are split off.
    pub(super) world: Option<Arc<NcclComm>>,
}

enum Made {
    Host(Box<dyn Backend>),
    Stream(Box<dyn StreamBackend>),
}

/// Who makes a group at the same time.
#[derive(Clone, Copy)]
pub(super) enum Together<'a> {
    /// Every rank of the job makes a group of this kind: a communicator can be split off the world's.
    Everybody(&'a str),
    /// Its members only: they need one of their own.
    Members,
}

impl Factory {
    fn nccl(
        &self,
        name: &str,
        rank: Rank,
        members: &[Rank],
        together: Together<'_>,
        deadline: Instant,
    ) -> Result<(Box<dyn StreamBackend>, Arc<NcclComm>)> {
        let membership = &self.membership;
        let (Some(gpu), Some(mesh)) = (&self.gpu, &self.mesh) else {
            return Err(Error::BackendUnavailable {
                backend: "nccl".into(),
                reason: "it was agreed on, but this rank has said that it cannot".into(),
            });
        };
        let peers: Vec<&Member> = members.iter().map(|r| &membership.roster.members[r.index()]).collect();
        let birth = match (&self.world, together) {
            (Some(world), Together::Everybody(kind)) => {
                // Before the members connect: those who wait for one of theirs would be missing here too.
                world.gather(&*membership.store, kind, name, deadline)?;
                CommInit::Split(world, members[0].0, rank.0)
            }
            _ => CommInit::Id(&*membership.store),
        };
        let streams = |connections: Vec<Option<Connection>>| {
            connections.into_iter().map(|connection| connection.map(|c| c.stream)).collect()
        };
        let streams = match mesh.connect(name, &peers, deadline) {
            Ok(connections) => streams(connections.into_slots()),
            Err(unconnected) => {
                let Unconnected { error, connections } = *unconnected;
                // What another rank has said to all of them says more than that it is gone.
                let told = self.world.as_ref().and_then(|world| world.check().err());
                let error = told.unwrap_or(error);
                stream::decline(streams(connections), &error);
                return Err(error);
            }
        };
        let members = peers.iter().map(|member| (*member).clone()).collect();
        let group = Members { group: name.into(), members, position: rank.index() };
        let profile = &self.config.profile;
        let instruments =
            Instruments { link_gbs: gpu.link_gbs, times_graphs: profile.enabled && profile.graphs };
        let (backend, comm) =
            nccl::connect(gpu.nccl, &gpu.device, group, streams, (&birth, instruments), deadline)?;
        Ok((Box::new(backend), comm))
    }

    pub(super) fn make(
        &mut self,
        name: &str,
        members: Vec<Rank>,
        together: Together<'_>,
        deadline: Instant,
    ) -> Result<ProcessGroup> {
        let settings = &self.config.process_group;
        let membership = &self.membership;
        let position = members.iter().position(|r| *r == membership.rank).expect("only members make a group");
        let rank = Rank(position as u32);
        let backend = match membership.agreement.backend {
            BackendKind::Loopback => {
                let hub = membership.loopback.as_ref().ok_or_else(|| {
                    Error::Rendezvous("the loopback backend was agreed on without shared memory".into())
                })?;
                Made::Host(Box::new(hub.join(name, rank, &members)))
            }
            BackendKind::Tcp => {
                let peers: Vec<&Member> =
                    members.iter().map(|r| &membership.roster.members[r.index()]).collect();
                let mesh = self.mesh.as_ref().ok_or_else(|| {
                    Error::Transport("the TCP backend was agreed on, but this rank does not listen".into())
                })?;
                let demand = match settings.tcp.algorithm {
                    AlgorithmChoice::Auto => None,
                    AlgorithmChoice::Ring => Some(Algorithm::Ring),
                    AlgorithmChoice::RecursiveDoubling => Some(Algorithm::RecursiveDoubling),
                    AlgorithmChoice::HalvingDoubling => Some(Algorithm::HalvingDoubling),
                    AlgorithmChoice::Direct => Some(Algorithm::Direct),
                };
                let settings = host::Settings {
                    demand,
                    segment: settings.tcp.segment.get().as_usize(),
                    spin: settings.tcp.spin,
                };
                let connections = mesh.connect(name, &peers, deadline).map_err(|unconnected| {
                    let Unconnected { error, connections } = *unconnected;
                    // Those that were reached wait for this rank, and would name it instead of the one that lacks.
                    host::decline(membership.rank, &peers, connections, &error);
                    error
                })?;
                let mut host = Host::new(name, rank, &peers, connections, settings);
                host.agree_on_cross_memory(deadline)?;
                Made::Host(Box::new(host))
            }
            BackendKind::Nccl => {
                let (backend, comm) = self.nccl(name, rank, &members, together, deadline)?;
                self.world.get_or_insert(comm);
                Made::Stream(backend)
            }
        };
        let profile = &self.config.profile;
        let recording = Recording {
            record: profile.enabled,
            threshold: profile.slow_call,
            every: profile.slow_call_every,
        };
        let info = GroupInfo {
            name: name.to_owned(),
            rank,
            members,
            timeout: settings.timeout.get(),
            bucket_bytes: settings.coalesce.as_usize(),
            recording,
        };
        let store = Some(Arc::clone(&membership.store));
        let mut group = match backend {
            Made::Host(b) => ProcessGroup::new(info, b, store),
            Made::Stream(b) => ProcessGroup::on_stream(info, b, store),
        };
        if settings.self_check {
            let timeout = deadline.saturating_duration_since(Instant::now()).max(Duration::from_secs(1));
            group.set_timeout(timeout);
            // The first calls connect the ranks, and take as long as that does. Whoever is refused a path must not leave as
            // one who is done.
            group.unrecorded(self_check::run).inspect_err(|error| group.abort(error))?;
            group.set_timeout(settings.timeout.get());
        }
        Ok(group)
    }
}

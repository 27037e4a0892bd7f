//! Makes groups, one after another.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ryzanstein_config::Config;

use crate::error::Result;
use crate::factory::{AnyBackend, BackendFactory, GroupSpec, Together};
use crate::group::{GroupInfo, ProcessGroup};
use crate::link::mesh::Mesh;
use crate::manager::self_check;
use crate::membership::rendezvous::Membership;
use crate::membership::roster::Member;
use crate::observe::flight_recorder::FlightRecorder;
use crate::observe::profile::Recording;
use crate::paths::tuned::TunedRange;
use crate::types::rank::Rank;

/// Bandwidth in 10⁹ bytes per second below which moving data is slow: on host memory, and on GPUs.
const SLOW_HOST_GBS: f64 = 0.1;
const SLOW_DEVICE_GBS: f64 = 10.0;

/// Everything that is needed to make another group.
pub(super) struct GroupMaker {
    pub(super) config: Config,
    pub(super) membership: Membership,
    pub(super) flight: FlightRecorder,
    /// Measured ranges of jobs like this one.
    pub(super) tuned: Vec<TunedRange>,
    /// Links to the other ranks, if the backend needs them.
    pub(super) mesh: Option<Mesh>,
    /// The factory of the selected backend.
    pub(super) factory: Box<dyn BackendFactory>,
}

impl GroupMaker {
    /// Connects a group of these ranks, including this one, and checks it.
    pub(super) fn make(
        &mut self,
        name: &str,
        ranks: Vec<Rank>,
        together: Together<'_>,
        deadline: Instant,
    ) -> Result<ProcessGroup> {
        let _span = tracing::info_span!("make_group", group = name, ranks = ranks.len()).entered();
        let (settings, membership) = (&self.config.process_group, &self.membership);
        let position = ranks.iter().position(|r| *r == membership.rank).expect("only members make a group");
        let rank = Rank(position as u32);
        let sharing_cpus = membership.roster.sharing_cpus(ranks.iter().copied(), membership.rank);
        let members: Vec<&Member> = ranks.iter().map(|r| &membership.roster.members[r.index()]).collect();
        let connecting = tracing::info_span!("connect", group = name).entered();
        let backend = self.factory.connect(&GroupSpec {
            name,
            rank,
            members,
            cpus_are_short: membership.roster.cpus_are_short(membership.rank),
            together,
            config: &self.config,
            // Groups of some ranks share the processors with other groups, which was not measured.
            tuned: if ranks.len() == membership.roster.world_size() { &self.tuned } else { &[] },
            store: &membership.store,
            mesh: self.mesh.as_ref(),
            deadline,
        })?;
        drop(connecting);
        let profile = &self.config.profile;
        let recording = Recording {
            record: profile.enabled,
            newest_calls: profile.recorder.get() as usize,
            slow_call: profile.slow_call,
            slow_gbs: match backend {
                AnyBackend::Cpu(_) => SLOW_HOST_GBS,
                AnyBackend::Stream(_) => SLOW_DEVICE_GBS,
            },
            every: profile.slow_call_every,
        };
        let info = GroupInfo {
            name: name.to_owned(),
            rank,
            sharing_cpus,
            members: ranks,
            timeout: settings.timeout.get(),
            bucket_bytes: settings.coalesce.as_usize(),
            numerics: self.config.model.numerics,
            recording,
            times_graphs: profile.enabled && profile.graphs,
        };
        let (store, flight) = (Arc::clone(&membership.store), self.flight.clone());
        let mut group = ProcessGroup::on(info, backend, Some(store), Some(flight));
        if settings.self_check {
            let _span = tracing::info_span!("self_check", group = name).entered();
            let timeout = deadline.saturating_duration_since(Instant::now()).max(Duration::from_secs(1));
            group.set_timeout(timeout);
            // The first calls connect the ranks, and take as long as that does. A rank whose path is rejected must not leave like a
            // rank that is done.
            group.without_profiling(self_check::run).inspect_err(|error| {
                group.abort(error);
                self.flight.failed();
            })?;
            group.set_timeout(settings.timeout.get());
            group.forget_last_call();
        }
        Ok(group)
    }
}

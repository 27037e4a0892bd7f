//! Turns a configuration into groups that have passed a self-check.

mod listen;
mod make;
mod registry;
pub(crate) mod self_check;
pub mod tuning;

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ryzanstein_config::{BackendChoice, Config, EncryptionChoice};

use self::registry::factories;
use crate::cpu;
use crate::device::{Device, LibrarySearch};
use crate::error::{Error, Result};
use crate::factory::{ProbeContext, Together};
use crate::group::ProcessGroup;
use crate::link::mesh::{self, Mesh};
use crate::link::security::Security;
use crate::membership::layout::Layout;
use crate::membership::rendezvous::{Membership, Rendezvous};
use crate::membership::roster::{Candidate, Cpus, Roster};
use crate::membership::store::{self, ProgramStore, Rounds, Store};
use crate::observe::flight_recorder::FlightRecorder;
use crate::observe::profile::{Profile, ProfileRow};
use crate::types::backend_kind::BackendKind;
use crate::types::deadline;
use crate::types::metric_names;
use crate::types::rank::{self, Rank};
use crate::types::sync::lock;
use listen::listen;
use make::GroupMaker;

/// Time for which leaving ranks wait for each other.
const FAREWELL: Duration = Duration::from_secs(10);
/// Time for which they then wait until their calls have been compared, which takes a few hundredths of a second.
const SETTLED: Duration = Duration::from_secs(5);

/// One rank's view of a job: its groups, and the state that they need.
///
/// Make one per process, once, and keep it: making it again costs a rendezvous, new connections and a new self-check, thousands of
/// times as much as a small all-reduce.
///
/// ```
/// use ryzanstein_config::{BackendChoice, Config};
/// use ryzanstein_process_group::{MemoryRendezvous, ProcessGroupManager, ReduceOp};
///
/// let mut config = Config::default();
/// config.process_group.backend = BackendChoice::Tcp;
/// std::thread::scope(|scope| {
///     for rendezvous in MemoryRendezvous::new(2) {
///         let config = &config;
///         scope.spawn(move || {
///             let mut manager = ProcessGroupManager::initialize(config, &rendezvous).unwrap();
///             let mut x = vec![1.0f32; 10];
///             manager.world().all_reduce(&mut x, ReduceOp::Sum).unwrap();
///             assert_eq!(x, [2.0; 10]);
///             manager.finalize().unwrap();
///         });
///     }
/// });
/// ```
pub struct ProcessGroupManager {
    groups: Vec<ProcessGroup>,
    tensor: usize,
    pipeline: usize,
    data: usize,
    profiles: Vec<Arc<Profile>>,
    made: HashMap<String, u32>,
    /// The barriers on the store, by name. Each is locked while this rank is in it.
    barriers: Mutex<HashMap<String, Arc<Mutex<Rounds>>>>,
    maker: GroupMaker,
    layout: Layout,
    init: Duration,
    backend_summary: String,
}

impl ProcessGroupManager {
    /// As [`initialize_with`](Self::initialize_with), if the loader knows the GPU libraries or they are configured.
    ///
    /// # Errors
    /// As there.
    pub fn initialize(config: &Config, rendezvous: &dyn Rendezvous) -> Result<Self> {
        Self::initialize_with(config, rendezvous, &LibrarySearch::default())
    }

    /// Joins the job, agrees on one backend with all ranks, connects the groups of the layout, and checks each with all-reduces
    /// whose values are compared, on every path that calls may take.
    ///
    /// # Errors
    /// Names the ranks that did not join, the unusable backend and the reason, or the path that produced a wrong value.
    pub fn initialize_with(
        config: &Config,
        rendezvous: &dyn Rendezvous,
        search: &LibrarySearch,
    ) -> Result<Self> {
        Self::join(config, rendezvous, search, None)
    }

    /// As [`initialize_with`](Self::initialize_with), on a GPU that the caller has opened or
    /// [taken over](Device::from_cudarc): calls run on its stream.
    ///
    /// # Errors
    /// As there.
    pub fn initialize_on(config: &Config, rendezvous: &dyn Rendezvous, device: &Device) -> Result<Self> {
        Self::join(config, rendezvous, &LibrarySearch::default(), Some(device))
    }

    fn join(
        config: &Config,
        rendezvous: &dyn Rendezvous,
        search: &LibrarySearch,
        device: Option<&Device>,
    ) -> Result<Self> {
        let started = Instant::now();
        Self::join_since(started, config, rendezvous, search, device).map_err(|error| error.since(started))
    }

    fn join_since(
        started: Instant,
        config: &Config,
        rendezvous: &dyn Rendezvous,
        search: &LibrarySearch,
        device: Option<&Device>,
    ) -> Result<Self> {
        let _span = tracing::info_span!("start").entered();
        let deadline = started + config.rendezvous.timeout.get();
        let wanted = config.process_group.backend;
        // For every backend, so that a wrong name is noticed before a job runs on CPUs.
        cpu::demanded(config)?;
        let mut factories = factories(wanted);
        let is_alone = rendezvous.world_size() == Some(1);
        let bound = (!is_alone).then(|| listen(config, rendezvous)).transpose();
        let context = ProbeContext {
            config,
            search,
            device,
            local_rank: rendezvous.local_rank(),
            listens: bound.as_ref().map(drop).map_err(Clone::clone),
        };
        let candidate = Candidate {
            host: rustix::system::uname().nodename().to_string_lossy().into_owned(),
            pid: std::process::id(),
            cpus: Cpus::current(),
            data_address: bound.as_ref().ok().and_then(|bound| Some(bound.as_ref()?.address())),
            wanted,
            capabilities: tracing::info_span!("probe")
                .in_scope(|| factories.iter_mut().map(|factory| factory.probe(&context)).collect()),
        };
        // The first candidate is the best.
        let obstacle = candidate.capabilities.first().and_then(|capability| capability.summary);
        let membership =
            tracing::info_span!("rendezvous").in_scope(|| rendezvous.join(candidate, deadline))?;
        membership.check(rendezvous.world_size())?;
        let Membership { rank, roster, selection, secret, .. } = &membership;
        let backend = selection.backend;
        // The other backends release their resources.
        let factory = factories.into_iter().find(|factory| factory.kind() == backend);
        let factory = factory.ok_or_else(|| Error::BackendUnavailable {
            backend: backend.name().into(),
            reason: format!("it was selected for all ranks, and this rank was told to use `{wanted}`"),
        })?;
        let world_size = roster.world_size();
        let epoch = roster.epoch;
        let backend_summary = summarize(backend, wanted, obstacle);
        // Information that is the same for all ranks is logged once.
        if rank.0 == 0 {
            tracing::info!(
                rank = rank.0,
                epoch = epoch.0,
                world_size,
                "backend {backend}: {backend_summary}"
            );
            tracing::debug!(
                rank = rank.0,
                version = env!("CARGO_PKG_VERSION"),
                "backend: {}",
                selection.reason
            );
        } else {
            tracing::debug!(rank = rank.0, epoch = epoch.0, world_size, "backend {backend}");
        }
        let number = rank.to_string();
        metrics::gauge!(metric_names::EPOCH.name, "rank" => number.clone()).set(epoch.0 as f64);
        metrics::gauge!(metric_names::WORLD_SIZE.name, "rank" => number).set(world_size as f64);
        warn_of_nccl(config, roster, *rank, backend);
        let layout = Layout::new(&config.layout, world_size)?;
        let tuned =
            tuning::agree(&config.process_group.tuning, search.state.as_deref(), &membership, deadline)?;
        let mesh = match bound {
            Ok(Some(bound)) if world_size > 1 => {
                let settings = mesh::Settings {
                    handshake: config.rendezvous.handshake_timeout.get(),
                    security: Security::new(&config.security)?,
                };
                Some(Mesh::start(bound, roster.epoch, *rank, secret.clone(), &settings)?)
            }
            _ => None,
        };
        let rank = *rank;
        let flight = FlightRecorder::new(rank, roster, config.profile.trace_dir.clone());
        let mut manager = Self {
            groups: Vec::new(),
            tensor: 0,
            pipeline: 0,
            data: 0,
            profiles: Vec::new(),
            made: HashMap::new(),
            barriers: Mutex::default(),
            maker: GroupMaker { config: config.clone(), membership, flight, tuned, mesh, factory },
            layout,
            init: Duration::ZERO,
            backend_summary,
        };
        manager.standard_group("world", Rank::all(world_size).collect(), deadline)?;
        manager.agree_on_layout()?;
        manager.tensor = manager.standard_group("tensor_parallel", layout.tensor_group(rank), deadline)?;
        manager.pipeline =
            manager.standard_group("pipeline_parallel", layout.pipeline_group(rank), deadline)?;
        manager.data = manager.standard_group("data_parallel", layout.data_group(rank), deadline)?;
        manager.init = started.elapsed();
        tracing::debug!(rank = rank.0, seconds = manager.init.as_secs_f64(), "process groups are ready");
        Ok(manager)
    }

    /// Returns the group of all ranks.
    pub fn world(&mut self) -> &mut ProcessGroup {
        &mut self.groups[0]
    }

    /// Returns the group of the ranks that share each layer with this one. It is the world group itself if it has all ranks.
    pub fn tensor_parallel(&mut self) -> &mut ProcessGroup {
        &mut self.groups[self.tensor]
    }

    /// Returns the group of the stages of this rank's pipeline, first stage first.
    pub fn pipeline_parallel(&mut self) -> &mut ProcessGroup {
        &mut self.groups[self.pipeline]
    }

    /// Returns the group of the ranks with the same weights as this one.
    pub fn data_parallel(&mut self) -> &mut ProcessGroup {
        &mut self.groups[self.data]
    }

    /// Makes a group of any ranks; member `i` of `ranks` gets rank `i` in it. All members call this with the same list, and make
    /// their common groups in the same order; the other ranks need not call. Returns `None` for a rank that is not a member.
    ///
    /// Nothing is cached: the same list makes a new group with connections, and on GPUs a communicator, of its own, which takes as
    /// long as the first did. Keep the group while it is in use. Dropping it frees its resources; its measurements stay in
    /// [`profile`](Self::profile).
    ///
    /// # Errors
    /// [`Error::Invalid`] for an empty list, a rank twice or one that is not in the job; [`Error::Timeout`] naming the
    /// members that did not join.
    pub fn new_group(&mut self, ranks: &[Rank]) -> Result<Option<ProcessGroup>> {
        let world_size = self.maker.membership.roster.world_size();
        for (index, rank) in ranks.iter().enumerate() {
            if rank.index() >= world_size || ranks[..index].contains(rank) {
                return Err(Error::invalid(format!(
                    "a group of ranks {}: rank {rank} is there twice or is not below the world size {world_size}",
                    rank::list(ranks)
                )));
            }
        }
        if ranks.is_empty() {
            return Err(Error::invalid("a group needs at least one rank"));
        }
        if !ranks.contains(&self.rank()) {
            return Ok(None);
        }
        let numbers: Vec<String> = ranks.iter().map(ToString::to_string).collect();
        let mut name = format!("group[{}]", numbers.join(","));
        let times = self.made.entry(name.clone()).or_default();
        *times += 1;
        if *times > 1 {
            name = format!("{name}#{times}");
        }
        let started = Instant::now();
        let deadline = started + self.maker.config.process_group.timeout.get();
        let group = self.maker.make(&name, ranks.to_vec(), Together::Members, deadline);
        let group = group.map_err(|error| error.since(started))?;
        self.profiles.push(group.profile());
        Ok(Some(group))
    }

    /// Returns this rank's global rank.
    pub fn rank(&self) -> Rank {
        self.maker.membership.rank
    }

    /// Returns all members of the job.
    pub fn roster(&self) -> &Roster {
        &self.maker.membership.roster
    }

    /// Returns the backend in use.
    pub fn backend(&self) -> BackendKind {
        self.maker.membership.selection.backend
    }

    /// Returns a short reason for this backend.
    pub fn backend_summary(&self) -> &str {
        &self.backend_summary
    }

    /// Returns the reasons for this backend, and against the others.
    pub fn backend_reason(&self) -> &str {
        &self.maker.membership.selection.reason
    }

    /// Returns the arrangement of the ranks.
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// Returns the duration of [`initialize`](Self::initialize).
    pub fn init_time(&self) -> Duration {
        self.init
    }

    /// Returns the job's shared store. It refuses keys that begin with [`store::OWN`].
    pub fn store(&self) -> Arc<dyn Store> {
        Arc::new(ProgramStore(Arc::clone(&self.maker.membership.store)))
    }

    /// Returns the measurements of all groups so far.
    pub fn profile(&self) -> Vec<ProfileRow> {
        self.profiles.iter().flat_map(|p| p.rows()).collect()
    }

    /// Returns the recorder of the newest calls of all groups, for inspection of a rank whose calls may be blocked. With
    /// `profile.trace_dir`, it writes a record there when a group fails.
    pub fn flight_recorder(&self) -> FlightRecorder {
        self.maker.flight.clone()
    }

    /// Returns the newest call in any of the standard groups, as `call 17 of group `world`: all_reduce(sum) of 10 f32`.
    pub fn last_call(&self) -> Option<String> {
        let calls = self.groups.iter().filter_map(|g| Some((g, g.last_call()?)));
        let (group, call) = calls.max_by_key(|(_, call)| call.started)?;
        Some(format!("call {} of group `{}`: {}", call.sequence, group.name(), call.fingerprint))
    }

    /// Clears the measurements.
    pub fn clear_profile(&self) {
        for profile in &self.profiles {
            profile.clear();
        }
    }

    /// Waits (10 s at most) until every rank has arrived, then leaves: closes links and frees everything. On GPUs, in between, it
    /// waits until the calls in the groups of the layout have been compared: some hundredths of a second. After 5 s it leaves with
    /// a warning that names the ranks whose calls have not been compared.
    ///
    /// # Errors
    /// [`Error::Timeout`] names the ranks that did not arrive. [`Error::Mismatch`] reports calls that differed but ended without
    /// an error, on the ranks that found it, [`Error::PeerAborted`] on others; [`Error::PeerLost`] names a rank that has made fewer
    /// calls in a group. A failure of a group that no call on this rank has reported yet is returned here, unless the world group
    /// has failed before. Everything is released in any case.
    pub fn finalize(mut self) -> Result<()> {
        let _span = tracing::info_span!("leave").entered();
        let world = self.world();
        if world.failure().is_some() {
            // No further agreement with the other ranks is possible; dropping says goodbye where that still works.
            return Ok(());
        }
        world.set_timeout(FAREWELL);
        world.barrier()?;
        // Mismatched calls may have ended without an error, on a backend that compares them only afterwards.
        let mut groups: Vec<_> = self.groups.iter_mut().filter(|group| group.failure().is_none()).collect();
        // A slow group does not keep the others from comparing.
        for group in &mut groups {
            group.announce_exit();
        }
        let deadline = Instant::now() + SETTLED;
        groups.into_iter().map(|group| group.verify_calls(deadline)).fold(Ok(()), Result::and)
    }

    /// Tells the other ranks that the program has panicked on this one, with the panic's message. For an uncaught panic, dropping
    /// this value does so, without the message.
    pub fn panicked(&self, message: &str) {
        let error = Error::Panicked(message.into());
        // This comes first: a blocked call of one group delays no other.
        self.groups.iter().for_each(|group| group.interrupt(&error));
        self.groups.iter().for_each(|group| group.abort(&error));
        self.maker.flight.failed();
    }

    /// Rejects ranks that would make other groups: they would wait for each other.
    fn agree_on_layout(&mut self) -> Result<()> {
        let mine = self.layout;
        let (rank, world) = (self.rank(), self.world());
        let all = world.without_profiling(|world| world.all_gather_object(&mine))?;
        let other = Rank::all(all.len()).zip(all).find(|(_, theirs)| *theirs != mine);
        other.map_or(Ok(()), |(other, theirs)| {
            Err(Error::Configuration(format!(
                "rank {rank} has the layout {mine}, and rank {other} has {theirs}: give all ranks the same [layout]"
            )))
        })
    }

    /// Returns the index of the group with these members, which is made now unless it exists.
    fn standard_group(&mut self, kind: &str, members: Vec<Rank>, deadline: Instant) -> Result<usize> {
        if let Some(same) = self.groups.iter().position(|g| g.members() == members) {
            return Ok(same);
        }
        let name = format!("{kind}[{}..{}]", members[0], members[members.len() - 1]);
        let name = if kind == "world" { kind } else { &name };
        let group =
            self.maker.make(name, members, Together::Everybody(kind), deadline).inspect_err(|error| {
                // Ranks that are not in this group wait for this one too, in a split of the world or with the next group.
                self.groups.iter().for_each(|group| group.abort(error));
                self.maker.flight.failed();
            })?;
        self.profiles.push(group.profile());
        self.groups.push(group);
        Ok(self.groups.len() - 1)
    }
}

impl Drop for ProcessGroupManager {
    fn drop(&mut self) {
        if std::thread::panicking() {
            // All groups before the first one waits for its record to be written.
            self.panicked("see what it wrote to its standard error");
        }
    }
}

impl std::fmt::Debug for ProcessGroupManager {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ProcessGroupManager")
            .field("rank", &self.rank())
            .field("groups", &self.groups)
            .finish_non_exhaustive()
    }
}

impl ProcessGroupManager {
    /// Waits on the job's store until every rank has entered the barrier `name`, as often as this rank. It works after a group has
    /// failed.
    ///
    /// # Errors
    /// [`Error::Timeout`] naming the missing ranks.
    pub fn store_barrier(&self, name: &str, timeout: Duration) -> Result<()> {
        let (membership, started) = (&self.maker.membership, Instant::now());
        let (n, until) = (membership.roster.world_size(), deadline::after(started, timeout));
        let rounds = Arc::clone(lock(&self.barriers).entry(name.to_owned()).or_default());
        let values =
            lock(&rounds).gather(&*membership.store, ("barrier", name), membership.rank, n, 0, until)?;
        store::complete(name, started, values)
    }
}

/// Warns a user who demands encryption: NCCL's own connections between hosts cannot be encrypted here.
fn warn_of_nccl(config: &Config, roster: &Roster, rank: Rank, backend: BackendKind) {
    let hosts = || roster.members.iter().map(|member| &member.host);
    let several = hosts().any(|host| hosts().next() != Some(host));
    let demanded = config.security.encryption != EncryptionChoice::Off;
    if rank.0 == 0 && demanded && several && backend == BackendKind::Nccl {
        tracing::warn!(
            "security.encryption is not off, but NCCL moves data between the hosts of this job on connections of its own, which \
             nothing encrypts: use a network that you trust, an encrypted one (IPsec, WireGuard), or the backend tcp"
        );
    }
}

/// Returns a short reason for `backend`. `obstacle` is the reason why this rank cannot use the best one.
fn summarize(backend: BackendKind, wanted: BackendChoice, obstacle: Option<&str>) -> String {
    if wanted != BackendChoice::Auto {
        return "as configured".into();
    }
    let best = BackendKind::allowed_by(wanted).first() == Some(&backend);
    match obstacle {
        _ if best => "every rank can use it".into(),
        Some(obstacle) => format!("{obstacle} (`ryz doctor` says more)"),
        None => "not every rank can use a faster one (`ryz doctor` says more)".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_summary_names_what_kept_this_rank_from_the_best_backend() {
        let auto = |backend, obstacle| summarize(backend, BackendChoice::Auto, obstacle);
        assert_eq!(auto(BackendKind::Nccl, None), "every rank can use it");
        assert_eq!(auto(BackendKind::Tcp, Some("no GPU here")), "no GPU here (`ryz doctor` says more)");
        assert!(auto(BackendKind::Tcp, None).starts_with("not every rank can use a faster one"));
        assert_eq!(summarize(BackendKind::Tcp, BackendChoice::Tcp, Some("no GPU here")), "as configured");
    }
}

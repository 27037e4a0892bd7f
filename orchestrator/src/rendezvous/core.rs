//! Decides on admission, the contents of the store, and waiting requests. No sockets, clock or threads here.
//!
//! [`Core::handle`] takes an [`Event`] and the time since the job began, and returns the requests to answer, with their
//! replies. The caller numbers requests with a [`RequestId`]; [`Core::next_deadline`] says when to call again with
//! [`Event::Tick`]. Everything belongs to an epoch: a request of another epoch is refused.

mod admission;
mod event;
mod key_values;

use std::collections::{BTreeMap, BTreeSet, HashMap};

use bytes::Bytes;
use ryzanstein_process_group::{Epoch, Member, Rank};

use self::admission::Admission;
#[cfg(test)]
use self::event::MAX_REPORT;
pub(crate) use self::event::{
    Action, Event, Join, Joined, Participant, Refusal, Reply, Report, RequestId, Time,
};
#[cfg(test)]
use self::key_values::{ENTRY_OVERHEAD, MAX_STORE};
use self::key_values::{KeyValues, check_key};

/// A pending request.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
struct Wait {
    /// The key that it waits for; `None` if it waits until all have joined.
    key: Option<String>,
    since: Time,
    deadline: Time,
}

/// The state of one job's rendezvous.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(crate) struct Core {
    world_size: u32,
    version: String,
    epoch: Epoch,
    admission: Admission,
    joined: Option<Joined>,
    /// The ranks whose processes have ended in this epoch, and how.
    exited: BTreeMap<Rank, String>,
    /// The reason why joining and waiting are refused for the rest of this epoch.
    closed: Option<Refusal>,
    values: KeyValues,
    waiting_for_key: HashMap<String, BTreeSet<RequestId>>,
    waits: HashMap<RequestId, Wait>,
    deadlines: BTreeSet<(Time, RequestId)>,
    reports: BTreeMap<Rank, Report>,
}

impl Core {
    /// Creates a rendezvous for `world_size` ranks that run `version`, in this epoch.
    pub(crate) fn new(world_size: u32, version: impl Into<String>, epoch: Epoch) -> Self {
        Self {
            world_size,
            version: version.into(),
            epoch,
            admission: Admission::new(world_size),
            joined: None,
            exited: BTreeMap::new(),
            closed: None,
            values: KeyValues::default(),
            waiting_for_key: HashMap::new(),
            waits: HashMap::new(),
            deadlines: BTreeSet::new(),
            reports: BTreeMap::new(),
        }
    }

    /// Returns the data that every rank receives, once all have joined. Processes that have joined may join again; when all of
    /// them have, this is replaced.
    pub(crate) const fn joined(&self) -> Option<&Joined> {
        self.joined.as_ref()
    }

    /// Returns the number of processes that wait until all have joined.
    pub(crate) fn joining(&self) -> usize {
        self.admission.len()
    }

    /// Returns the current epoch.
    pub(crate) const fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// Returns the reports of ranks in this epoch: the first report of each.
    pub(crate) const fn reports(&self) -> &BTreeMap<Rank, Report> {
        &self.reports
    }

    /// Returns a counter of the store; 0 if it does not exist.
    pub(crate) fn counter(&self, key: &str) -> i64 {
        self.values.sum(key, 0).unwrap_or(0)
    }

    /// Returns a value of the store.
    pub(crate) fn value(&self, key: &str) -> Option<Bytes> {
        self.values.get(key)
    }

    /// Returns the time at which [`Event::Tick`] is due.
    pub(crate) fn next_deadline(&self) -> Option<Time> {
        self.deadlines.first().map(|(time, _)| *time)
    }

    /// Returns the number of pending requests.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(crate) fn waiting(&self) -> usize {
        self.waits.len()
    }

    /// Takes an event and returns the replies to send.
    pub(crate) fn handle(&mut self, now: Time, event: Event) -> Vec<Action> {
        // Expire first: an event after the deadline must not complete a request that is already overdue.
        let mut actions = self.expire(now);
        match event {
            Event::Join(request, join) => self.join(now, request, join, &mut actions),
            Event::Set(request, epoch, key, value) => {
                let outcome =
                    self.check_epoch(Some(epoch)).and_then(|()| self.set(&key, &value, &mut actions));
                actions.push((request, outcome.map(|()| Reply::Done)));
            }
            Event::Add(request, epoch, key, amount) => {
                let outcome =
                    self.check_epoch(Some(epoch)).and_then(|()| self.add(&key, amount, &mut actions));
                actions.push((request, outcome.map(Reply::Sum)));
            }
            Event::Get(request, epoch, key, deadline) => {
                let found = self.check_epoch(Some(epoch)).and_then(|()| {
                    check_key(&key)?;
                    match self.values.get(&key) {
                        Some(value) => Ok(Some(value)),
                        None => self.open().map(|()| None),
                    }
                });
                match found {
                    Ok(None) => {
                        self.waiting_for_key.entry(key.clone()).or_default().insert(request);
                        self.wait(request, Wait { key: Some(key), since: now, deadline });
                        actions.extend(self.expire(now));
                    }
                    Ok(Some(value)) => actions.push((request, Ok(Reply::Value(value)))),
                    Err(refusal) => actions.push((request, Err(refusal))),
                }
            }
            Event::Report(request, epoch, rank, report) => {
                let outcome = self.check_epoch(Some(epoch)).map(|()| {
                    if rank.0 < self.world_size {
                        self.reports.entry(rank).or_insert_with(|| report.bounded());
                    }
                    Reply::Done
                });
                actions.push((request, outcome));
            }
            Event::Disconnected(request) => self.gone(request),
            Event::ProcessExited(rank, how) => {
                self.exited.insert(rank, how);
                self.miss_exited(&mut actions);
            }
            Event::JobFailed(why) => self.close(Refusal::Refused(why), &mut actions),
            Event::NewEpoch(epoch) => {
                let why = format!("the job goes on in epoch {epoch}");
                self.close(Refusal::Refused(why), &mut actions);
                let version = std::mem::take(&mut self.version);
                *self = Self::new(self.world_size, version, epoch);
            }
            Event::Tick => {}
        }
        actions
    }

    fn check_epoch(&self, epoch: Option<Epoch>) -> Result<(), Refusal> {
        match epoch {
            Some(epoch) if epoch != self.epoch => Err(Refusal::Epoch(format!(
                "this process belongs to epoch {epoch} of the job, which is in epoch {} now",
                self.epoch
            ))),
            _ => Ok(()),
        }
    }

    /// Refuses joining and waiting in an epoch that was closed.
    fn open(&self) -> Result<(), Refusal> {
        self.closed.clone().map_or(Ok(()), Err)
    }

    fn wait(&mut self, request: RequestId, wait: Wait) {
        self.deadlines.insert((wait.deadline, request));
        self.waits.insert(request, wait);
    }

    fn stop_waiting(&mut self, request: RequestId) -> Option<Wait> {
        let wait = self.waits.remove(&request)?;
        self.deadlines.remove(&(wait.deadline, request));
        Some(wait)
    }

    fn join(&mut self, now: Time, request: RequestId, join: Join, actions: &mut Vec<Action>) {
        let admitted = self.may_join(&join).and_then(|()| {
            let participant = self.member_again(join.participant)?;
            self.admission.admit(request, participant)
        });
        if let Err(refusal) = admitted {
            actions.push((request, Err(refusal)));
            return;
        }
        self.wait(request, Wait { key: None, since: now, deadline: join.deadline });
        if !self.admission.is_complete() {
            self.miss_exited(actions);
            actions.extend(self.expire(now));
            return;
        }
        let admission = std::mem::replace(&mut self.admission, Admission::new(self.world_size));
        let (requests, roster, candidates) = admission.assign_ranks(self.epoch);
        match ryzanstein_process_group::select_backend(&candidates) {
            Ok(selection) => {
                // The groups of an earlier membership used the same keys.
                self.values.forget_members();
                self.joined = Some(Joined { roster, selection });
                for (rank, request) in Rank::all(requests.len()).zip(requests) {
                    self.stop_waiting(request);
                    actions.push((request, Ok(Reply::Rank(rank))));
                }
            }
            Err(error) => self.close(Refusal::Configuration(error), actions),
        }
    }

    /// Returns a process that joins after all have joined as the member that it is: one that has finalized and initializes
    /// again. Refuses any other process.
    fn member_again(&self, participant: Participant) -> Result<Participant, Refusal> {
        let Some(joined) = &self.joined else { return Ok(participant) };
        let candidate = &participant.candidate;
        let is_same = |member: &Member| member.host == candidate.host && member.pid == candidate.pid;
        let members = &joined.roster.members;
        match participant.rank.and_then(|rank| members.get(rank.index())) {
            Some(holder) if is_same(holder) => Ok(participant),
            Some(holder) => Err(admission::taken(&participant, holder.rank, &holder.host, holder.pid)),
            None => {
                let own = members.iter().find(|own| is_same(own) && !self.admission.contains(own.rank));
                let rank = own.ok_or_else(|| admission::all_taken(&participant, self.world_size))?.rank;
                Ok(Participant { rank: Some(rank), ..participant })
            }
        }
    }

    /// Refuses joins that cannot complete, because a process that has not joined has ended.
    fn miss_exited(&mut self, actions: &mut Vec<Action>) {
        let is_joining = self.joined.is_none() || !self.admission.is_empty();
        if !is_joining || self.closed.is_some() {
            return;
        }
        let missed = self.exited.iter().find(|(rank, _)| !self.admission.contains(**rank));
        if let Some((rank, how)) = missed {
            let again = if self.joined.is_some() { " again" } else { "" };
            self.close(Refusal::Refused(format!("rank {rank} {how} without joining{again}")), actions);
        }
    }

    fn may_join(&self, join: &Join) -> Result<(), Refusal> {
        self.check_epoch(join.epoch)?;
        self.open()?;
        let who = join.participant.describe();
        if join.version != self.version {
            return Err(Refusal::Configuration(format!(
                "{who} runs version {}, but the rendezvous runs {}; install the same version on every node",
                join.version, self.version
            )));
        }
        if join.world_size != self.world_size {
            return Err(Refusal::Configuration(format!(
                "{who} was told that there are {} ranks, but this job has {}; start all ranks with the same world size",
                join.world_size, self.world_size
            )));
        }
        Ok(())
    }

    fn set(&mut self, key: &str, value: &[u8], actions: &mut Vec<Action>) -> Result<(), Refusal> {
        let value = self.values.set(key, value)?;
        for request in self.waiting_for_key.remove(key).unwrap_or_default() {
            self.stop_waiting(request);
            actions.push((request, Ok(Reply::Value(value.clone()))));
        }
        Ok(())
    }

    fn add(&mut self, key: &str, amount: i64, actions: &mut Vec<Action>) -> Result<i64, Refusal> {
        let sum = self.values.sum(key, amount)?;
        self.set(key, &sum.to_le_bytes(), actions)?;
        Ok(sum)
    }

    /// Expires requests that have reached their deadline. An expired join fails for all ranks that wait, since it can no longer
    /// complete; an expired key fails only for the request that waited.
    fn expire(&mut self, now: Time) -> Vec<Action> {
        let mut actions = Vec::new();
        while let Some(&(deadline, request)) = self.deadlines.first()
            && deadline <= now
        {
            let Some(Wait { key, since, .. }) = self.stop_waiting(request) else { break };
            let waited = now.saturating_sub(since);
            if let Some(key) = key {
                self.forget_waiter(&key, request);
                let what = format!("waiting for store key `{key}`");
                actions.push((request, Err(Refusal::Timeout { what, waited, missing: Vec::new() })));
                continue;
            }
            let what = format!("joining epoch {}", self.epoch);
            let refusal = Refusal::Timeout { what, waited, missing: self.admission.missing() };
            self.closed = Some(Refusal::Refused(format!(
                "this process joined too late: another rank gave up waiting after {waited:.1?}"
            )));
            for request in self.admission.requests() {
                self.stop_waiting(request);
                actions.push((request, Err(refusal.clone())));
            }
        }
        actions
    }

    fn forget_waiter(&mut self, key: &str, request: RequestId) {
        if let Some(requests) = self.waiting_for_key.get_mut(key) {
            requests.remove(&request);
            if requests.is_empty() {
                self.waiting_for_key.remove(key);
            }
        }
    }

    fn gone(&mut self, request: RequestId) {
        match self.stop_waiting(request) {
            None => {}
            Some(Wait { key: Some(key), .. }) => self.forget_waiter(&key, request),
            // The rank may have lost its connection and join again.
            Some(Wait { key: None, .. }) => self.admission.withdraw(request),
        }
    }

    /// Refuses all pending requests and all later ones that would wait. The first reason is kept.
    fn close(&mut self, refusal: Refusal, actions: &mut Vec<Action>) {
        let mut requests: Vec<RequestId> = self.waits.keys().copied().collect();
        requests.sort_unstable();
        for request in requests {
            actions.push((request, Err(refusal.clone())));
        }
        self.waits.clear();
        self.deadlines.clear();
        self.waiting_for_key.clear();
        self.closed.get_or_insert(refusal);
    }
}

#[cfg(test)]
mod every_run;
#[cfg(test)]
mod tests;

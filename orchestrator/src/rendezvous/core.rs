//! Decides who is in, what the store holds and who waits for what. No sockets, no clock, no threads here.
//!
//! [`Core::handle`] takes an [`Event`] and the time since the job began, and returns whom to answer and how. Waiting
//! requests are known by a [`Ticket`] that the caller hands out; [`Core::next_deadline`] says when to call again with
//! [`Event::Tick`]. Everything belongs to an epoch: a request of another one is refused.

mod event;
mod seats;
mod values;

use std::collections::{BTreeMap, BTreeSet, HashMap};

use bytes::Bytes;
use ryzanstein_process_group::{Candidate, Epoch, Rank};

pub use self::event::{
    Action, Answer, Event, Join, Joined, Joiner, MAX_REPORT, Refusal, Report, Ticket, Time,
};
use self::seats::Seats;
pub use self::values::{ENTRY_OVERHEAD, MAX_STORE};
use self::values::{Values, check_key};

/// What a waiting ticket waits for.
#[derive(Debug)]
enum Wait {
    Join { since: Time, deadline: Time },
    Key { key: String, since: Time, deadline: Time },
    Barrier { name: String, rank: Rank, since: Time, deadline: Time },
}

impl Wait {
    const fn deadline(&self) -> Time {
        match self {
            Self::Join { deadline, .. } | Self::Key { deadline, .. } | Self::Barrier { deadline, .. } => {
                *deadline
            }
        }
    }
}

/// The state of one job's rendezvous.
#[derive(Debug)]
pub struct Core {
    world_size: u32,
    version: String,
    epoch: Epoch,
    seats: Seats,
    joined: Option<Joined>,
    /// Why nobody can join, or wait, any more in this epoch.
    closed: Option<Refusal>,
    values: Values,
    barriers: HashMap<String, BTreeMap<Rank, Ticket>>,
    waiting_for_key: HashMap<String, BTreeSet<Ticket>>,
    waits: HashMap<Ticket, Wait>,
    deadlines: BTreeSet<(Time, Ticket)>,
    reports: BTreeMap<Rank, Report>,
}

impl Core {
    /// A rendezvous for `world_size` ranks that run `version`, in this epoch.
    pub fn new(world_size: u32, version: impl Into<String>, epoch: Epoch) -> Self {
        Self {
            world_size,
            version: version.into(),
            epoch,
            seats: Seats::new(world_size),
            joined: None,
            closed: None,
            values: Values::default(),
            barriers: HashMap::new(),
            waiting_for_key: HashMap::new(),
            waits: HashMap::new(),
            deadlines: BTreeSet::new(),
            reports: BTreeMap::new(),
        }
    }

    /// What everyone got who joined, once all have come.
    pub const fn joined(&self) -> Option<&Joined> {
        self.joined.as_ref()
    }

    /// The generation now.
    pub const fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// What ranks reported in this epoch: the first word of each.
    pub const fn reports(&self) -> &BTreeMap<Rank, Report> {
        &self.reports
    }

    /// When [`Event::Tick`] is due.
    pub fn next_deadline(&self) -> Option<Time> {
        self.deadlines.first().map(|(time, _)| *time)
    }

    /// How many requests wait.
    pub fn waiting(&self) -> usize {
        self.waits.len()
    }

    /// Takes what has happened and says whom to answer.
    pub fn handle(&mut self, now: Time, event: Event) -> Vec<Action> {
        // Who is late is told so before anything that comes after the deadline can help.
        let mut actions = self.expire(now);
        match event {
            Event::Join(ticket, join) => self.join(now, ticket, join, &mut actions),
            Event::Set(ticket, epoch, key, value) => {
                let outcome = self.fence(Some(epoch)).and_then(|()| self.set(&key, &value, &mut actions));
                actions.push((ticket, outcome.map(|()| Answer::Done)));
            }
            Event::Add(ticket, epoch, key, amount) => {
                let outcome = self.fence(Some(epoch)).and_then(|()| self.add(&key, amount, &mut actions));
                actions.push((ticket, outcome.map(Answer::Sum)));
            }
            Event::Get(ticket, epoch, key, deadline) => {
                let found = self.fence(Some(epoch)).and_then(|()| {
                    check_key(&key)?;
                    match self.values.get(&key) {
                        Some(value) => Ok(Some(value)),
                        None => self.open().map(|()| None),
                    }
                });
                match found {
                    Ok(None) => {
                        self.waiting_for_key.entry(key.clone()).or_default().insert(ticket);
                        self.wait(ticket, Wait::Key { key, since: now, deadline });
                        actions.extend(self.expire(now));
                    }
                    Ok(Some(value)) => actions.push((ticket, Ok(Answer::Value(value)))),
                    Err(refusal) => actions.push((ticket, Err(refusal))),
                }
            }
            Event::Barrier(ticket, epoch, name, rank, deadline) => {
                if let Err(refusal) = self.fence(Some(epoch)).and_then(|()| self.enter(&name, rank)) {
                    actions.push((ticket, Err(refusal)));
                } else {
                    self.barriers.entry(name.clone()).or_default().insert(rank, ticket);
                    self.wait(ticket, Wait::Barrier { name: name.clone(), rank, since: now, deadline });
                    self.open_barrier(&name, &mut actions);
                    actions.extend(self.expire(now));
                }
            }
            Event::Report(ticket, epoch, rank, report) => {
                let outcome = self.fence(Some(epoch)).map(|()| {
                    if rank.0 < self.world_size {
                        self.reports.entry(rank).or_insert_with(|| report.bounded());
                    }
                    Answer::Done
                });
                actions.push((ticket, outcome));
            }
            Event::Gone(ticket) => self.gone(ticket),
            Event::Left(rank, how) => {
                if self.joined.is_none() && self.closed.is_none() && !self.seats.holds(rank) {
                    let why = format!("rank {rank} {how} without joining");
                    self.close(Refusal::Refused(why), &mut actions);
                }
            }
            Event::Failed(why) => self.close(Refusal::Refused(why), &mut actions),
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

    fn fence(&self, epoch: Option<Epoch>) -> Result<(), Refusal> {
        match epoch {
            Some(epoch) if epoch != self.epoch => Err(Refusal::Refused(format!(
                "this process belongs to epoch {epoch} of the job, which is in epoch {} now",
                self.epoch
            ))),
            _ => Ok(()),
        }
    }

    /// Nobody can join, or wait, in an epoch that was closed.
    fn open(&self) -> Result<(), Refusal> {
        self.closed.clone().map_or(Ok(()), Err)
    }

    fn wait(&mut self, ticket: Ticket, wait: Wait) {
        self.deadlines.insert((wait.deadline(), ticket));
        self.waits.insert(ticket, wait);
    }

    fn stop_waiting(&mut self, ticket: Ticket) -> Option<Wait> {
        let wait = self.waits.remove(&ticket)?;
        self.deadlines.remove(&(wait.deadline(), ticket));
        Some(wait)
    }

    fn join(&mut self, now: Time, ticket: Ticket, join: Join, actions: &mut Vec<Action>) {
        if let Err(refusal) = self.may_join(&join).and_then(|()| self.seats.take(ticket, join.joiner)) {
            actions.push((ticket, Err(refusal)));
            return;
        }
        self.wait(ticket, Wait::Join { since: now, deadline: join.deadline });
        if !self.seats.full() {
            actions.extend(self.expire(now));
            return;
        }
        let (tickets, roster, candidates) = self.seats.settle(self.epoch);
        match ryzanstein_process_group::agree(&candidates) {
            Ok(agreement) => {
                self.joined = Some(Joined { roster, agreement });
                for (rank, ticket) in Rank::all(tickets.len()).zip(tickets) {
                    self.stop_waiting(ticket);
                    actions.push((ticket, Ok(Answer::Seat(rank))));
                }
            }
            Err(why) => self.close(Refusal::Configuration(why), actions),
        }
    }

    fn may_join(&self, join: &Join) -> Result<(), Refusal> {
        self.fence(join.epoch)?;
        self.open()?;
        let who = join.joiner.describe();
        if join.version != self.version {
            return Err(Refusal::Configuration(format!(
                "{who} runs version {}, but the rendezvous runs {}; install one version on every node",
                join.version, self.version
            )));
        }
        if join.world_size != self.world_size {
            return Err(Refusal::Configuration(format!(
                "{who} was told that there are {} ranks, but this job has {}; start all with one world size",
                join.world_size, self.world_size
            )));
        }
        Ok(())
    }

    fn set(&mut self, key: &str, value: &Bytes, actions: &mut Vec<Action>) -> Result<(), Refusal> {
        self.values.set(key, value.clone())?;
        for ticket in self.waiting_for_key.remove(key).unwrap_or_default() {
            self.stop_waiting(ticket);
            actions.push((ticket, Ok(Answer::Value(value.clone()))));
        }
        Ok(())
    }

    fn add(&mut self, key: &str, amount: i64, actions: &mut Vec<Action>) -> Result<i64, Refusal> {
        let sum = self.values.sum(key, amount)?;
        self.set(key, &Bytes::copy_from_slice(&sum.to_le_bytes()), actions)?;
        Ok(sum)
    }

    fn enter(&self, name: &str, rank: Rank) -> Result<(), Refusal> {
        check_key(name)?;
        self.open()?;
        if rank.0 >= self.world_size {
            return Err(Refusal::Invalid(format!("there is no rank {rank} in a job of {}", self.world_size)));
        }
        if self.barriers.get(name).is_some_and(|here| here.contains_key(&rank)) {
            return Err(Refusal::Invalid(format!("rank {rank} waits at the barrier `{name}` already")));
        }
        Ok(())
    }

    /// Lets everyone through if everyone is there. The name is free again then.
    fn open_barrier(&mut self, name: &str, actions: &mut Vec<Action>) {
        if self.barriers.get(name).is_none_or(|here| here.len() < self.world_size as usize) {
            return;
        }
        for ticket in self.barriers.remove(name).unwrap_or_default().into_values() {
            self.stop_waiting(ticket);
            actions.push((ticket, Ok(Answer::Done)));
        }
    }

    /// Gives up on whatever has reached its deadline: a key for those who waited so long, a join or a barrier for all
    /// who wait there, since it cannot be complete any more.
    fn expire(&mut self, now: Time) -> Vec<Action> {
        let mut actions = Vec::new();
        while let Some(&(deadline, ticket)) = self.deadlines.first()
            && deadline <= now
        {
            let Some(wait) = self.stop_waiting(ticket) else { break };
            match wait {
                Wait::Key { key, since, .. } => {
                    self.forget_waiter(&key, ticket);
                    let what = format!("waiting for store key `{key}`");
                    let refusal =
                        Refusal::Timeout { what, waited: now.saturating_sub(since), missing: Vec::new() };
                    actions.push((ticket, Err(refusal)));
                }
                Wait::Barrier { name, since, .. } => {
                    let here = self.barriers.remove(&name).unwrap_or_default();
                    let missing =
                        Rank::all(self.world_size as usize).filter(|r| !here.contains_key(r)).collect();
                    let what = format!("barrier `{name}`");
                    let refusal = Refusal::Timeout { what, waited: now.saturating_sub(since), missing };
                    for ticket in here.into_values() {
                        self.stop_waiting(ticket);
                        actions.push((ticket, Err(refusal.clone())));
                    }
                }
                Wait::Join { since, .. } => {
                    let refusal = Refusal::Timeout {
                        what: format!("joining epoch {}", self.epoch),
                        waited: now.saturating_sub(since),
                        missing: self.seats.missing(),
                    };
                    self.closed = Some(Refusal::Refused(format!(
                        "this process comes too late: another rank gave up waiting after {:.1?}",
                        now.saturating_sub(since)
                    )));
                    for ticket in self.seats.tickets() {
                        self.stop_waiting(ticket);
                        actions.push((ticket, Err(refusal.clone())));
                    }
                }
            }
        }
        actions
    }

    fn forget_waiter(&mut self, key: &str, ticket: Ticket) {
        if let Some(tickets) = self.waiting_for_key.get_mut(key) {
            tickets.remove(&ticket);
            if tickets.is_empty() {
                self.waiting_for_key.remove(key);
            }
        }
    }

    fn gone(&mut self, ticket: Ticket) {
        match self.stop_waiting(ticket) {
            None => {}
            // Its seat is free again: it may have lost its connection and come back.
            Some(Wait::Join { .. }) => self.seats.free(ticket),
            Some(Wait::Key { key, .. }) => self.forget_waiter(&key, ticket),
            Some(Wait::Barrier { name, rank, .. }) => {
                if let Some(here) = self.barriers.get_mut(&name) {
                    here.remove(&rank);
                    if here.is_empty() {
                        self.barriers.remove(&name);
                    }
                }
            }
        }
    }

    /// Refuses all who wait, and all who would. The first reason stays.
    fn close(&mut self, refusal: Refusal, actions: &mut Vec<Action>) {
        let mut tickets: Vec<Ticket> = self.waits.keys().copied().collect();
        tickets.sort_unstable();
        for ticket in tickets {
            actions.push((ticket, Err(refusal.clone())));
        }
        self.waits.clear();
        self.deadlines.clear();
        self.barriers.clear();
        self.waiting_for_key.clear();
        self.closed.get_or_insert(refusal);
    }

    /// What a candidate that was seated said of itself.
    pub fn candidate(&self, rank: Rank) -> Option<&Candidate> {
        self.seats.candidate(rank)
    }
}

#[cfg(test)]
mod tests;

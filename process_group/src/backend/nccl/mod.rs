//! NVIDIA's collectives, behind the same trait as ours.
//!
//! A call is enqueued on a stream and `Ok` means just that: the result is there for whatever comes after it in the stream.
//! A watcher ends the communicators when a rank is lost, a deadline passes or NCCL reports an error, so that no kernel and
//! no caller waits for ever.

#![allow(unsafe_code, reason = "NCCL's functions are foreign; each block says why it holds")]

mod combine;
mod communicator;
mod handles;
mod issue;
mod ledger;
mod lifecycle;
mod links;
mod messages;
mod scratch;
mod shared;
mod timings;
mod watch;

use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::{Backend, Completion, Path, Ticket, Timings};
use crate::buffer::{Memory, View, ViewMut};
use crate::call::Call;
use crate::device::{Device, DeviceBuffer, Event, Handle, Nccl as Table, Stream};
use crate::error::{Error, Result};
use crate::foreign;
use crate::operation::{Operation, Signature};
use crate::rank::Rank;
use crate::roster::{BackendKind, Member};
pub(crate) use communicator::{Birth, Communicator, decline};
use issue::Finish;
use ledger::Verdict;
use links::Links;
use messages::{Peers, peer};
use scratch::Scratch;
use shared::{Shared, VERDICT, lock};
use timings::Awaited;
pub use timings::Captured;

/// How often it is asked whether the members' calls have been compared.
const SETTLING: Duration = Duration::from_millis(1);
/// How long it is waited for what a member has found that has made more calls.
const REBUTTAL: Duration = Duration::from_millis(200);
/// For what has no deadline of its own.
const NEVER: Duration = Duration::from_secs(365 * 24 * 3600);

/// One rank's end of a group.
pub(crate) struct Nccl {
    communicator: Arc<Communicator>,
    shared: Arc<Shared>,
    device: Device,
    /// Where asynchronous calls run.
    side: Stream,
    /// Of the compute stream and of `side`.
    scratch: [Scratch; 2],
    /// What calls run on, while the caller is inside NCCL; nothing in a group of one.
    handle: Option<Handle>,
    /// Between [`Backend::begin`] and [`Backend::end`]: since when, and with whom messages have been exchanged.
    grouped: Option<(Instant, Peers)>,
    /// What is enqueued behind NCCL's part, once that is.
    finishes: Vec<Finish>,
    token: DeviceBuffer,
    link_gbs: Option<f64>,
    /// Whether calls in graphs are timed.
    times_graphs: bool,
    /// While calls are recorded.
    captured: Option<Captured>,
    /// What was recorded and may be in a graph still, which marks times in it.
    kept: Vec<Arc<Captured>>,
}

impl Nccl {
    /// Makes the communicator of a group, with all its members. `members` in group order; `streams` as
    /// [`super::tcp::data_plane::DataPlane::connect`] gives them.
    pub(crate) fn new(
        table: Table,
        device: &Device,
        group: &str,
        (position, members): (usize, &[&Member]),
        streams: Vec<Option<TcpStream>>,
        birth: &Birth<'_>,
        deadline: Instant,
    ) -> Result<Self> {
        let shared = Shared::new(table, device, group, members, position);
        let communicator = Arc::new(Communicator::open(shared, Links::new(streams), birth, deadline)?);
        let parts = || Ok((device.new_stream()?, DeviceBuffer::from_slice(device, &[0i32])?));
        // The others have made the communicator, and would see this rank leave as one who is done.
        let (side, token) = parts().inspect_err(|error| communicator.abort(error))?;
        Ok(Self {
            shared: Arc::clone(&communicator.shared),
            communicator,
            side,
            scratch: Default::default(),
            handle: None,
            grouped: None,
            finishes: Vec::new(),
            token,
            device: device.clone(),
            link_gbs: None,
            times_graphs: false,
            captured: None,
            kept: Vec::new(),
        })
    }

    /// For the profile: what the GPU's links carry, and whether calls in graphs are timed.
    pub(crate) fn profiled(mut self, link_gbs: Option<f64>, times_graphs: bool) -> Self {
        self.link_gbs = link_gbs;
        self.times_graphs = times_graphs;
        self
    }

    /// The communicator, to split others off it.
    pub(crate) fn communicator(&self) -> Arc<Communicator> {
        Arc::clone(&self.communicator)
    }

    /// Which of a pair belongs to this stream.
    fn which(&self, stream: &Stream) -> usize {
        usize::from(stream.handle() == self.side.handle())
    }

    /// Enqueues a call, and has it followed. Says whether it went into a graph.
    fn enqueue(&mut self, call: &Call<'_>, stream: &Stream) -> Result<bool> {
        self.shared.check()?;
        self.device.bind()?;
        if self.grouped.is_some() {
            return self.enqueue_inside(call, stream);
        }
        self.handle = self.shared.enter(Some(call.signature), Peers::of(&call.signature), call.deadline)?;
        let outcome = self.enqueue_inside(call, stream);
        self.shared.leave();
        outcome
    }

    fn enqueue_inside(&mut self, call: &Call<'_>, stream: &Stream) -> Result<bool> {
        let shared = Arc::clone(&self.shared);
        let Call { signature, sequence, deadline, .. } = *call;
        let capturing = stream.is_capturing()?;
        // What is captured counts when it is launched.
        if !capturing {
            shared.note(signature);
        }
        let peers = Peers::of(&signature);
        if let Some((_, all)) = &mut self.grouped {
            *all = all.and(peers);
        }
        let alone = self.grouped.is_none();
        let is_timed = |captured: &Captured| captured.times(signature) && alone && self.times_graphs;
        let in_graph = match self.captured.as_ref().filter(|captured| capturing && is_timed(captured)) {
            Some(_) => Some(Captured::begin(stream)?),
            None => None,
        };
        // A group of calls is followed as one.
        let which = self.which(stream);
        let flights = (alone && !capturing).then(|| &shared.flights[which]);
        let enqueued = Instant::now();
        let events = flights.map_or(Ok(None), |flights| lock(flights).begin(stream, enqueued))?;
        self.issue(call, stream)?;
        if alone {
            self.finish(stream)?;
        }
        if let Some(flights) = flights {
            let collectives = shared.collectives();
            let signature = Some(signature);
            lock(flights).end(
                events,
                stream,
                Awaited { signature, sequence, collectives, peers, enqueued, deadline },
            )?;
        }
        if let Some(captured) = self.captured.as_mut().filter(|_| capturing) {
            captured.count(signature);
            if let Some(events) = in_graph {
                captured.end(signature, events, stream)?;
            }
        }
        if alone {
            self.scratch[which].reuse(&self.device, stream)?;
        }
        Ok(capturing)
    }

    /// Lets what comes next on the compute stream come after all that is on the other.
    fn join_side(&self) -> Result<()> {
        let compute = self.device.stream();
        if compute.is_capturing()? {
            return Ok(());
        }
        self.device.bind()?;
        let there = Event::new(&self.side, false)?;
        there.record(&self.side)?;
        Ok(compute.wait_event(&there)?)
    }

    fn begin_inside(&mut self) -> Result<()> {
        self.device.bind()?;
        let begun = Instant::now();
        // SAFETY: closed by `end` on the same thread.
        let code = unsafe { foreign!(nccl, self.shared.nccl.ncclGroupStart()) };
        self.shared.outcome("ncclGroupStart", code, 0)?;
        self.grouped = Some((begun, Peers::default()));
        Ok(())
    }

    fn end_inside(&mut self, (begun, peers): (Instant, Peers), deadline: Instant) -> Result<()> {
        let (shared, stream) = (Arc::clone(&self.shared), self.device.stream().clone());
        // SAFETY: opened by `begin` on the same thread.
        let code = unsafe { foreign!(nccl, shared.nccl.ncclGroupEnd()) };
        let outcome = shared.outcome("ncclGroupEnd", code, self.handle.unwrap_or_default());
        outcome.map_err(|error| shared.refused(error))?;
        self.finish(&stream)?;
        if !stream.is_capturing()? {
            let collectives = shared.collectives();
            let awaited = Awaited {
                signature: None,
                sequence: collectives,
                collectives,
                peers,
                enqueued: begun,
                deadline,
            };
            lock(&shared.flights[0]).end(None, &stream, awaited)?;
        }
        self.scratch[0].reuse(&self.device, &stream)
    }

    /// What comes behind NCCL's part of the calls.
    fn finish(&mut self, stream: &Stream) -> Result<()> {
        std::mem::take(&mut self.finishes).into_iter().try_for_each(|finish| finish.run(&self.device, stream))
    }
}

impl Backend for Nccl {
    fn kind(&self) -> BackendKind {
        BackendKind::Nccl
    }

    fn memory(&self) -> Memory {
        Memory::Device(self.device.ordinal())
    }

    fn device(&self) -> Option<&Device> {
        Some(&self.device)
    }

    fn side(&self) -> Option<&Stream> {
        Some(&self.side)
    }

    fn copy(&mut self, from: View<'_>, to: ViewMut<'_>) -> Result<()> {
        if let (Some(from), Some(to)) = (from.device(), to.device()) {
            // SAFETY: both are borrowed views of allocated memory of equal length, and the copy is in stream order.
            unsafe { self.device.stream().copy(to.address, from.address, from.bytes) }?;
        }
        Ok(())
    }

    fn submit(&mut self, call: Call<'_>) -> Result<Completion> {
        let stream = self.device.stream().clone();
        let captured = self.enqueue(&call, &stream)?;
        if call.signature.operation == Operation::Barrier && !captured {
            let shared = Arc::clone(&self.shared);
            let what = || format!("call {} of group `{}`, barrier,", call.sequence, shared.group);
            shared.wait(what, None, call.deadline, || Ok(stream.is_idle()?))?;
        }
        Ok(Completion { path: Path::Nccl, enqueued: true, captured })
    }

    fn start(&mut self, call: Call<'_>) -> Result<(Completion, Box<dyn Ticket>)> {
        let (compute, side) = (self.device.stream().clone(), self.side.clone());
        self.device.bind()?;
        // Behind what computes the input, and beside what comes after it.
        let ready = Event::new(&compute, false)?;
        ready.record(&compute)?;
        side.wait_event(&ready)?;
        let captured = self.enqueue(&call, &side)?;
        let done = Event::new(&side, false)?;
        done.record(&side)?;
        let Call { signature, sequence, deadline, .. } = call;
        let ticket =
            Flight { shared: Arc::clone(&self.shared), done, compute, signature, sequence, deadline };
        Ok((Completion { path: Path::Nccl, enqueued: true, captured }, Box::new(ticket)))
    }

    fn begin(&mut self) -> Result<()> {
        let shared = &*self.shared;
        shared.check()?;
        // Their deadline comes at the end; until then they wait for nobody.
        self.handle = shared.enter(None, Peers::default(), Instant::now() + NEVER)?;
        let outcome = self.begin_inside();
        if outcome.is_err() {
            self.shared.leave();
        }
        outcome
    }

    fn end(&mut self, deadline: Instant) -> Result<()> {
        let Some(begun) = self.grouped.take() else { return Ok(()) };
        self.shared.expect_by(deadline, begun.1);
        let outcome = self.end_inside(begun, deadline);
        self.shared.leave();
        outcome
    }

    fn synchronize(&mut self, deadline: Instant) -> Result<()> {
        let (shared, device, side) = (&self.shared, &self.device, &self.side);
        let what = || format!("waiting for GPU {} in group `{}`", device.ordinal(), shared.group);
        shared.wait(what, None, deadline, || Ok(device.stream().is_idle()? && side.is_idle()?))?;
        Ok(shared.flights.iter().try_for_each(|flights| lock(flights).all_done())?)
    }

    fn timings(&self) -> Option<Arc<dyn Timings>> {
        Some(Arc::clone(&self.shared) as Arc<dyn Timings>)
    }

    fn record(&mut self, recording: bool) -> Option<Arc<Captured>> {
        if recording && let Err(error) = self.join_side() {
            // Whoever uses the GPU next hears of it.
            tracing::debug!(%error, "asynchronous calls are not waited for before others are recorded");
        }
        let before = std::mem::replace(&mut self.captured, recording.then(Captured::default));
        let before = before.map(Arc::new);
        // Whoever has recorded holds it for as long as the graph, and so does what times the graph's last launch.
        self.kept.retain(|captured| Arc::strong_count(captured) > 1);
        self.kept.extend(before.clone());
        before
    }

    fn replay(
        &mut self,
        captured: &Arc<Captured>,
        deadline: Instant,
        launch: &mut dyn FnMut() -> bool,
    ) -> Result<()> {
        self.shared.check()?;
        self.device.bind()?;
        let peers = captured.peers();
        self.shared.enter(None, peers, deadline)?;
        let _inside = Leaves(&self.shared);
        let flights = &self.shared.flights[0];
        lock(flights).launching(captured)?;
        let enqueued = Instant::now();
        let awaited = launch().then(|| {
            if peers != Peers::default() {
                let mut messages = lock(&self.shared.messages);
                captured.counts().iter().for_each(|(call, times)| messages.note(call, *times));
            }
            let mut ledger = lock(&self.shared.ledger);
            captured.collectives().iter().for_each(|call| ledger.note(*call));
            let sequence = ledger.newest().sequence;
            Awaited { signature: None, sequence, collectives: sequence, peers, enqueued, deadline }
        });
        Ok(lock(flights).launched(self.device.stream(), awaited)?)
    }

    fn leave(&mut self) {
        self.shared.leaves.store(true, Ordering::Release);
    }

    fn settle(&mut self, deadline: Instant) -> Result<()> {
        let shared = &*self.shared;
        let made = shared.collectives();
        let mut more_since = None;
        loop {
            let verdict = lock(&shared.comparison).verdict(shared.position, made);
            shared.check()?;
            let rank = |position: usize| shared.members[position].rank;
            match verdict {
                Verdict::Same => return Ok(()),
                // That member may still find a call that differs, which says more.
                Verdict::More(..) if more_since.get_or_insert_with(Instant::now).elapsed() < REBUTTAL => {
                    std::thread::sleep(SETTLING);
                }
                Verdict::More(position, theirs) => {
                    return Err(Error::Mismatch {
                        group: shared.group.clone(),
                        sequence: made + 1,
                        field: "the number of calls",
                        rank: rank(shared.position),
                        mine: format!("{made} collectives in all"),
                        peer: rank(position),
                        theirs: format!("{theirs}"),
                    });
                }
                // The watcher says within that time which call differs.
                Verdict::Disputed if Instant::now() < deadline + VERDICT => std::thread::sleep(SETTLING),
                Verdict::Disputed => {
                    return Err(Error::Transport("the watching thread does not answer".into()));
                }
                Verdict::Open(positions) if Instant::now() >= deadline => {
                    let ranks: Vec<Rank> = positions.into_iter().map(rank).collect();
                    let (group, ranks) = (&shared.group, crate::rank::list(&ranks));
                    tracing::warn!(
                        group,
                        ranks,
                        "their calls have not been compared with this rank's in time"
                    );
                    return Ok(());
                }
                Verdict::Open(_) => std::thread::sleep(SETTLING),
            }
        }
    }

    fn link_gbs(&self) -> Option<f64> {
        self.link_gbs
    }

    fn paths(&self) -> Vec<Path> {
        vec![Path::Nccl]
    }

    fn force(&mut self, path: Option<Path>) -> Result<()> {
        match path {
            None | Some(Path::Nccl) => Ok(()),
            Some(other) => Err(Error::invalid(format!("the NCCL backend has no path `{other}`"))),
        }
    }

    fn abort(&mut self, why: &Error) {
        self.communicator.abort(why);
    }
}

/// A caller that is inside NCCL until this is dropped, even if what it calls there panics.
struct Leaves<'a>(&'a Shared);

impl Drop for Leaves<'_> {
    fn drop(&mut self) {
        self.0.leave();
    }
}

impl Drop for Nccl {
    fn drop(&mut self) {
        // Before memory is freed, which waits for the GPU: a call whose peers never came ends with the communicator only.
        self.communicator.close();
    }
}

impl Timings for Shared {
    fn take(&self) -> Vec<(Signature, Path, Duration)> {
        let mut all = Vec::new();
        for flights in &self.flights {
            let mut flights = lock(flights);
            if let Err(error) = flights.land() {
                // Whoever uses the GPU next hears of it; what had landed before counts.
                tracing::debug!(%error, "the GPU's times cannot be read");
            }
            all.extend(flights.take_landed().into_iter().map(|(s, took)| (s, Path::Nccl, took)));
        }
        all
    }
}

/// An asynchronous call on its way.
struct Flight {
    shared: Arc<Shared>,
    done: Event,
    compute: Stream,
    signature: Signature,
    sequence: u64,
    deadline: Instant,
}

impl Ticket for Flight {
    fn wait(&mut self) -> Result<()> {
        let Self { shared, done, signature, sequence, .. } = self;
        let what = || format!("call {sequence} of group `{}`, {signature},", shared.group);
        shared.wait(what, peer(signature), self.deadline, || Ok(done.is_done()?))
    }

    fn check(&self) -> Result<()> {
        self.shared.check()
    }

    fn follow(&mut self) -> Result<()> {
        Ok(self.compute.wait_event(&self.done)?)
    }
}

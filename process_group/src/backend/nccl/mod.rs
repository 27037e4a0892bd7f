//! NVIDIA's collectives, behind the same trait as ours.
//!
//! A call is enqueued on a stream and `Ok` means just that: the result is there for whatever comes after it in the stream.
//! NCCL is never waited in: communicators do not block, and a watcher ends them when a rank is lost, a deadline passes or
//! NCCL reports an error, so that no kernel waits for ever.

#![allow(unsafe_code, reason = "NCCL's functions are foreign; each block says why it holds")]

mod combine;
mod communicator;
mod error;
mod issue;
mod links;
mod scratch;
mod shared;
mod timings;
mod watch;

pub use error::NcclError;

use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::{Backend, Completion, Path, Ticket, Timings};
use crate::buffer::{Memory, View, ViewMut};
use crate::call::{Call, Operation, Signature};
use crate::device::{Device, DeviceBuffer, Event, Nccl as Table, Stream};
use crate::error::{Error, Result};
use crate::roster::{BackendKind, Member};
pub(crate) use communicator::{Birth, Communicator};
use issue::Finish;
use links::Links;
use scratch::Scratch;
use shared::{Shared, lock};

/// One rank's end of a group.
pub(crate) struct Nccl {
    communicator: Arc<Communicator>,
    shared: Arc<Shared>,
    device: Device,
    /// Where asynchronous calls run.
    side: Stream,
    /// Of the compute stream and of `side`.
    scratch: [Scratch; 2],
    /// Between [`Backend::begin`] and [`Backend::end`].
    grouped: bool,
    /// What is enqueued behind NCCL's part, once that is.
    finishes: Vec<Finish>,
    token: DeviceBuffer,
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
        Ok(Self {
            shared: Arc::clone(&communicator.shared),
            communicator,
            side: device.new_stream()?,
            scratch: Default::default(),
            grouped: false,
            finishes: Vec::new(),
            token: DeviceBuffer::from_slice(device, &[0i32])?,
            device: device.clone(),
        })
    }

    /// The communicator, to split others off it.
    pub(crate) fn communicator(&self) -> Arc<Communicator> {
        Arc::clone(&self.communicator)
    }

    /// Enqueues a call between two events that time it.
    fn enqueue(&mut self, call: &Call<'_>, stream: &Stream) -> Result<()> {
        let shared = Arc::clone(&self.shared);
        shared.check()?;
        self.device.bind()?;
        let Call { signature, sequence, deadline, .. } = *call;
        if !signature.operation.is_point_to_point() {
            shared.sequence.store(sequence, Ordering::Release);
        }
        // Inside a capture or a group there is no moment at which an event could be set.
        let timed = !self.grouped && !stream.is_capturing()?;
        let enqueued = Instant::now();
        let events = if timed { lock(&shared.flights).begin(stream)? } else { None };
        self.issue(call, stream)?;
        if !self.grouped {
            self.finish(stream)?;
        }
        if let Some(events) = events {
            let (what, when) = ((signature, sequence), (enqueued, deadline));
            lock(&shared.flights).end(events, stream, what, when)?;
        }
        Ok(())
    }

    /// What comes behind NCCL's part of the calls.
    fn finish(&mut self, stream: &Stream) -> Result<()> {
        self.scratch.iter_mut().for_each(Scratch::reuse);
        for finish in std::mem::take(&mut self.finishes) {
            finish.run(&self.device, stream)?;
        }
        Ok(())
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

    fn copy(&mut self, from: View<'_>, to: ViewMut<'_>) -> Result<()> {
        if let (Some(from), Some(to)) = (from.device(), to.device()) {
            // SAFETY: both are borrowed views of allocated memory of equal length, and the copy is in stream order.
            unsafe { self.device.stream().copy(to.address, from.address, from.bytes) }?;
        }
        Ok(())
    }

    fn submit(&mut self, call: Call<'_>) -> Result<Completion> {
        let stream = self.device.stream().clone();
        self.enqueue(&call, &stream)?;
        if call.signature.operation == Operation::Barrier && !stream.is_capturing()? {
            let shared = Arc::clone(&self.shared);
            let what = || format!("call {} of group `{}`, barrier,", call.sequence, shared.group);
            shared.wait(what, call.deadline, || Ok(stream.is_idle()?))?;
        }
        Ok(Completion { path: Path::Nccl, enqueued: true })
    }

    fn start(&mut self, call: Call<'_>) -> Result<(Completion, Box<dyn Ticket>)> {
        let (compute, side) = (self.device.stream().clone(), self.side.clone());
        self.device.bind()?;
        // Behind what computes the input, and beside what comes after it.
        let ready = Event::new(&compute, false)?;
        ready.record(&compute)?;
        side.wait_event(&ready)?;
        self.enqueue(&call, &side)?;
        let done = Event::new(&side, false)?;
        done.record(&side)?;
        let Call { signature, sequence, deadline, .. } = call;
        let ticket =
            Flight { shared: Arc::clone(&self.shared), done, compute, signature, sequence, deadline };
        Ok((Completion { path: Path::Nccl, enqueued: true }, Box::new(ticket)))
    }

    fn begin(&mut self) -> Result<()> {
        self.shared.check()?;
        // SAFETY: closed by `end` on the same thread.
        let code = unsafe { (self.shared.nccl.ncclGroupStart)() };
        if code != 0 {
            return Err(self.shared.error("ncclGroupStart", code, 0));
        }
        self.grouped = true;
        Ok(())
    }

    fn end(&mut self, deadline: Instant) -> Result<()> {
        self.grouped = false;
        // SAFETY: opened by `begin` on the same thread.
        let code = unsafe { (self.shared.nccl.ncclGroupEnd)() };
        self.settle("ncclGroupEnd", code, deadline)?;
        let stream = self.device.stream().clone();
        self.finish(&stream)
    }

    fn synchronize(&mut self, deadline: Instant) -> Result<()> {
        let (shared, device, side) = (&self.shared, &self.device, &self.side);
        let what = || format!("waiting for GPU {} in group `{}`", device.ordinal(), shared.group);
        shared.wait(what, deadline, || Ok(device.stream().is_idle()? && side.is_idle()?))
    }

    fn timings(&self) -> Option<Arc<dyn Timings>> {
        Some(Arc::clone(&self.shared) as Arc<dyn Timings>)
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

impl Timings for Shared {
    fn take(&self) -> Vec<(Signature, Path, Duration)> {
        let mut flights = lock(&self.flights);
        if let Err(error) = flights.land() {
            // Whoever uses the GPU next hears of it; what had landed before counts.
            tracing::debug!(%error, "the GPU's times cannot be read");
        }
        flights.take_landed().into_iter().map(|(s, took)| (s, Path::Nccl, took)).collect()
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
        shared.wait(what, self.deadline, || Ok(done.is_done()?))
    }

    fn join(&mut self) -> Result<()> {
        self.shared.check()?;
        Ok(self.compute.wait_event(&self.done)?)
    }
}

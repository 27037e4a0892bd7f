//! Groups whose calls run on a GPU's stream: a watchdog, a log of calls that finds ranks whose calls differ, calls in flight and
//! their times, workspace, and graphs.
//!
//! A call is enqueued on a stream and `Ok` means just that: the result is available to later work in the stream. [`PeerMemory`]
//! enqueues calls; [`StreamGroup`] does everything else. Data flow in one direction: the caller's thread reports to the watchdog's
//! through a channel, and only learns from it that the group has failed.

#![allow(
    unsafe_code,
    reason = "calls are enqueued with the addresses of their buffers; each block says why it holds"
)]

mod call_log;
mod capture;
mod control_mesh;
mod control_message;
mod desync;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;
mod messages;
mod pending;
mod side_call;
mod timer;
mod watchdog;
mod workspace;

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::backend::{Backend, Completion};
use crate::types::backend_kind::BackendKind;
use cudarc::driver::SyncOnDrop;

use crate::backend::call::Call;
use crate::backend::timings::Timings;
use crate::device::buffer::{View, ViewMut};
use crate::device::{Device, DeviceError, Event, Stream, tracked};
use crate::error::{Error, Result};
use crate::gpu::PeerMemory;
use crate::link::security::Channel;
use crate::paths::{Path, PathTable};
use crate::types::dtype::DType;
use crate::types::operation::{CallFingerprint, Operation};
use capture::Capture;
pub(crate) use capture::StreamCapture;
use control_mesh::ControlMesh;
use control_message::ControlMessage;
use side_call::SideCall;
pub(crate) use side_call::StreamWork;
use timer::{CallTimer, Started, Throttle};
use watchdog::{Called, CallerEvent};
pub(crate) use watchdog::{GroupMembers, Monitored, Pending, Status, Watchdog};
use workspace::Workspace;

/// Index of the stream that the caller computes on.
const COMPUTE: usize = 0;
/// Index of the stream of asynchronous calls.
const SIDE: usize = 1;

/// Minimum time between two marks after consecutive calls on the compute stream: a mark is an event, which takes time on the GPU.
const MARK_INTERVAL: Duration = Duration::from_micros(100);
/// Maximum number of marks on the compute stream at a time. Calls beyond them are waited for with the next mark.
const MAX_MARKS: usize = 512;
/// Time for which a call that the library rejected waits for the watchdog to identify the lost rank: the library may notice first.
const FAILURE_GRACE: Duration = Duration::from_millis(300);
/// Time for which a rank that cannot connect a group waits for those it has reached to receive the reason.
const HEARD: Duration = Duration::from_millis(20);

/// One rank's end of a group whose calls run on streams of a GPU.
pub(crate) struct StreamGroup {
    communicator: PeerMemory,
    watchdog: Arc<Watchdog>,
    device: Device,
    /// The compute stream, and the stream of asynchronous calls.
    streams: [Stream; 2],
    /// Their ends at the time when a caller began to wait for them.
    ends: [Event; 2],
    workspaces: [Workspace; 2],
    marks: Marks,
    /// Present while calls are captured.
    capture: Option<Capture>,
    /// Bandwidth of this rank's links in one direction, in 10⁹ bytes per second, if the hardware is rated.
    link_gbs: Option<f64>,
    /// True if the newest call is on the side stream: the next one on the compute stream is ordered after it, as a communicator
    /// works on one stream at a time.
    is_on_side: bool,
    /// True if kernels of this crate may not have ended; the library does not wait for them at its end.
    has_own_kernels: bool,
}

impl StreamGroup {
    /// Puts a communicator on the device's compute stream, and on a second stream for asynchronous calls.
    pub(crate) fn new(
        communicator: PeerMemory,
        watchdog: Watchdog,
        device: &Device,
        link_gbs: Option<f64>,
    ) -> Result<Self> {
        // The other ranks have made the communicator, and would see this rank leave like a rank that is done.
        let make = || {
            let streams = [device.stream().clone(), device.new_stream()?];
            let ends = [Event::new(&streams[COMPUTE], false)?, Event::new(&streams[SIDE], false)?];
            Ok((streams, ends))
        };
        let (streams, ends) = make().inspect_err(|error| watchdog.abort(error))?;
        Ok(Self {
            communicator,
            watchdog: Arc::new(watchdog),
            device: device.clone(),
            streams,
            ends,
            workspaces: Default::default(),
            marks: Marks::default(),
            capture: None,
            link_gbs,
            is_on_side: false,
            has_own_kernels: false,
        })
    }

    /// Enqueues a call, and has the watchdog watch it.
    #[inline]
    fn enqueue(&mut self, call: &mut Call<'_>, which: usize) -> Result<Completion> {
        if which == COMPUTE {
            self.return_from_side()?;
        }
        let Self { communicator, watchdog, device, marks, .. } = self;
        let stream = &self.streams[which];
        watchdog.check()?;
        device.bind()?;
        let Call { fingerprint, sequence, deadline, .. } = *call;
        let captured = stream.is_capturing()?;
        let bytes = communicator.nccl.workspace_bytes(call);
        // This comes first: a call that is rejected here reserves nothing.
        let _until_enqueued =
            order(call.input.as_mut(), call.output.as_mut(), &self.streams[COMPUTE], stream)?;
        let workspace = self.workspaces[which].reserve(device, stream, bytes)?;
        let at = Instant::now();
        let inside = watchdog.enter(|entry| {
            let (call, is_captured) = (fingerprint, captured);
            CallerEvent::Called(Called { stream: which, entry, call, sequence, at, deadline, is_captured })
        })?;
        let mut capture = self.capture.as_mut().filter(|_| captured);
        let in_graph = match &mut capture {
            Some(capture) => capture.begin(&fingerprint, stream)?,
            None => false,
        };
        let started = if captured { None } else { marks.begin(fingerprint, which, stream, at)? };
        // SAFETY: the views of the call are as their makers promised, the workspace has just been reserved for it, and
        // `inside` has been given out by a group that had not failed.
        let launched = unsafe { communicator.launch(call, stream, workspace) };
        let path = launched.map_err(|error| refused(watchdog, error))?;
        self.has_own_kernels |= !captured && matches!(path, Path::PeerMemory(_));
        match capture {
            Some(capture) => capture.end(fingerprint, path, in_graph, stream)?,
            None if captured => {}
            None => marks.end(watchdog, which, stream, (started, fingerprint, path), at)?,
        }
        drop(inside);
        self.workspaces[which].reuse(&self.device, &self.streams[which])?;
        Ok(Completion { path, enqueued: true, captured, waited: Duration::ZERO })
    }

    /// Enqueues calls as a group.
    fn launch_group(
        &mut self,
        calls: &mut [Call<'_>],
        captured: bool,
        deadline: Instant,
    ) -> Result<Vec<Path>> {
        let Self { communicator, watchdog, device, marks, .. } = self;
        let stream = &self.streams[COMPUTE];
        let ordered: Result<Vec<_>> = calls
            .iter_mut()
            .map(|call| order(call.input.as_mut(), call.output.as_mut(), stream, stream))
            .collect();
        let _until_enqueued = ordered?;
        let mut workspaces = Vec::with_capacity(calls.len());
        for call in &*calls {
            let bytes = communicator.nccl.workspace_bytes(call);
            workspaces.push(self.workspaces[COMPUTE].reserve(device, stream, bytes)?);
        }
        let at = Instant::now();
        let inside = watchdog.enter(|entry| CallerEvent::GroupStarted { entry, at })?;
        communicator.nccl.group_start()?;
        let mut paths = Vec::with_capacity(calls.len());
        let mut outcome = Ok(());
        for (call, workspace) in calls.iter().zip(workspaces) {
            watchdog.report(CallerEvent::GroupCalled { call: call.fingerprint, is_captured: captured });
            // SAFETY: as in `enqueue`; each call has a part of the workspace.
            match unsafe { communicator.launch(call, stream, workspace) } {
                Ok(path) => paths.push(path),
                Err(error) => {
                    outcome = Err(error);
                    break;
                }
            }
        }
        watchdog.report(CallerEvent::GroupEnded { deadline, is_captured: captured });
        // The group is ended in any case, whatever the result of its calls.
        let ended = communicator.nccl.group_end(stream, deadline);
        outcome.and(ended).map_err(|error| refused(watchdog, error))?;
        match self.capture.as_mut().filter(|_| captured) {
            Some(capture) => {
                let mut all = calls.iter().zip(&paths);
                all.try_for_each(|(call, path)| capture.end(call.fingerprint, *path, false, stream))?;
            }
            None if captured => {}
            None => drop(marks.place(watchdog, COMPUTE, stream, at)?),
        }
        drop(inside);
        Ok(paths)
    }

    /// Orders the next call on the compute stream after the newest one, on whichever stream that is.
    #[inline]
    fn return_from_side(&mut self) -> Result<()> {
        if self.is_on_side {
            self.is_on_side = !self.join_side()?;
        }
        Ok(())
    }

    /// Orders later work on the compute stream after all work on the other, and returns true if this is permanent: within a capture
    /// it applies to the graph only, and not to work on a stream outside it.
    fn join_side(&self) -> Result<bool> {
        let [compute, side] = &self.streams;
        let is_captured = compute.is_capturing()?;
        if is_captured && !side.is_capturing()? {
            return Ok(false);
        }
        self.device.bind()?;
        let there = Event::new(side, false)?;
        there.record(side)?;
        compute.wait_event(&there)?;
        Ok(!is_captured)
    }

    /// Returns the GPU whose memory contains the buffers of calls.
    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    /// Begins a call on a second stream, after the earlier work of the compute stream and in parallel with its later work.
    ///
    /// # Errors
    /// As [`submit`](Backend::submit).
    pub(crate) fn start(&mut self, mut call: Call<'_>) -> Result<(Completion, Box<dyn StreamWork>)> {
        let [compute, side] = self.streams.clone();
        self.device.bind()?;
        // Ordered after the computation of the input, and in parallel with later work.
        let ready = Event::new(&compute, false)?;
        ready.record(&compute)?;
        side.wait_event(&ready)?;
        self.is_on_side = true;
        let completion = self.enqueue(&mut call, SIDE)?;
        let done = Event::new(&side, false)?;
        done.record(&side)?;
        let Call { fingerprint, sequence, deadline, .. } = call;
        let watchdog = Arc::clone(&self.watchdog);
        let compute = compute.clone();
        Ok((completion, Box::new(SideCall { watchdog, done, compute, fingerprint, sequence, deadline })))
    }

    /// Executes several calls, which the backend may combine; each gets a completion.
    ///
    /// # Errors
    /// As [`submit`](Backend::submit).
    pub(crate) fn group(&mut self, mut calls: Vec<Call<'_>>, deadline: Instant) -> Result<Vec<Completion>> {
        let compute = self.streams[COMPUTE].clone();
        self.watchdog.check()?;
        self.return_from_side()?;
        self.device.bind()?;
        let captured = compute.is_capturing()?;
        let paths = self.launch_group(&mut calls, captured, deadline);
        self.workspaces[COMPUTE].reuse(&self.device, &self.streams[COMPUTE])?;
        Ok(paths?
            .into_iter()
            .map(|path| Completion { path, enqueued: true, captured, waited: Duration::ZERO })
            .collect())
    }

    /// Captures the following calls into a graph, with events around some of them if it is timed.
    pub(crate) fn begin_capture(&mut self, is_timed: bool) {
        if let Err(error) = self.join_side() {
            // The next call on the GPU reports it.
            tracing::debug!(%error, "asynchronous calls are not waited for before others are captured");
        }
        self.capture = Some(Capture::new(is_timed));
    }

    /// Ends the capture, and returns the data with which the graph's launches are watched.
    pub(crate) fn end_capture(&mut self) -> Arc<StreamCapture> {
        self.capture.take().unwrap_or_else(|| Capture::new(false)).finish()
    }

    /// Watches a graph with captured calls. `launch` launches it on the compute stream, or reports that it could not.
    ///
    /// # Errors
    /// As [`submit`](Backend::submit).
    pub(crate) fn replay(
        &mut self,
        captured: &Arc<StreamCapture>,
        deadline: Instant,
        launch: &mut dyn FnMut() -> bool,
    ) -> Result<()> {
        self.watchdog.check()?;
        self.return_from_side()?;
        self.device.bind()?;
        let (at, calls, watchdog) = (Instant::now(), Arc::clone(&captured.calls), Arc::clone(&self.watchdog));
        let _inside = watchdog.enter(|entry| CallerEvent::Launching { entry, at, deadline, calls })?;
        self.marks.timer.launching(captured)?;
        if launch() {
            let is_own = |(_, path, _): &(CallFingerprint, Path, u64)| matches!(path, Path::PeerMemory(_));
            self.has_own_kernels |= captured.calls().counts().iter().any(is_own);
            watchdog.report(CallerEvent::Launched);
            if let Some(end) = self.marks.place(&watchdog, COMPUTE, &self.streams[COMPUTE], at)? {
                self.marks.timer.launched(captured, &end);
            }
        }
        Ok(())
    }

    /// Waits until every enqueued call is done, at most until the deadline.
    ///
    /// # Errors
    /// As [`submit`](Backend::submit).
    pub(crate) fn synchronize(&mut self, deadline: Instant) -> Result<()> {
        let [compute, side] = &self.ends;
        // Other threads may enqueue more in the meantime: that is not waited for.
        compute.record(&self.streams[COMPUTE])?;
        side.record(&self.streams[SIDE])?;
        self.wait(deadline, || Ok(compute.is_done()? && side.is_done()?))?;
        self.watchdog.report(CallerEvent::Idle);
        self.has_own_kernels = false;
        Ok(())
    }

    /// Waits for an event on the GPU, at most until the deadline. Later work may still run.
    ///
    /// # Errors
    /// As [`submit`](Backend::submit).
    pub(crate) fn synchronize_event(&self, event: &Event, deadline: Instant) -> Result<()> {
        self.wait(deadline, || Ok(event.is_done()?))
    }

    fn wait(&self, deadline: Instant, done: impl FnMut() -> Result<bool>) -> Result<()> {
        let group = &self.watchdog.status().members.group;
        let what = || format!("waiting for GPU {} in group `{group}`", self.device.ordinal());
        self.watchdog.wait(what, None, deadline, done)
    }

    /// Returns the watchdog of the group.
    pub(crate) fn watchdog(&self) -> &Watchdog {
        &self.watchdog
    }

    /// Returns the source of the times of enqueued calls.
    pub(crate) fn timings(&self) -> Arc<dyn Timings> {
        Arc::clone(&self.marks.timer) as Arc<dyn Timings>
    }

    /// Returns the bandwidth of this rank's links in one direction, in 10⁹ bytes per second, if the hardware is rated.
    pub(crate) fn link_gbs(&self) -> Option<f64> {
        self.link_gbs
    }
}

/// The events after calls: few, as each costs GPU time.
#[derive(Default)]
struct Marks {
    timer: Arc<CallTimer>,
    throttle: Throttle,
    /// Time of the newest mark on the compute stream.
    newest: Option<Instant>,
    /// Number of events that have been made for marks of the compute stream.
    made: usize,
}

impl Marks {
    /// Records the start of a call, if it is to be timed.
    fn begin(
        &mut self,
        call: CallFingerprint,
        which: usize,
        stream: &Stream,
        at: Instant,
    ) -> Result<Option<Started>> {
        Ok(self.timer.begin(&mut self.throttle, call, which, stream, at)?)
    }

    /// Places a mark after a call, unless there is a recent one on the compute stream.
    fn end(
        &mut self,
        watchdog: &Watchdog,
        which: usize,
        stream: &Stream,
        (started, call, path): (Option<Started>, CallFingerprint, Path),
        at: Instant,
    ) -> Result<()> {
        if let Some(started) = started {
            let end = self.timer.end(started, (call, path), which, stream)?;
            watchdog.report_mark(which, end, false);
            if which == COMPUTE {
                self.newest = Some(at);
            }
            return Ok(());
        }
        let is_recent = |newest: Instant| at.saturating_duration_since(newest) < MARK_INTERVAL;
        // On the side stream no later call would mark the last one.
        if which == COMPUTE && self.newest.is_some_and(is_recent) {
            return Ok(());
        }
        self.place(watchdog, which, stream, at).map(drop)
    }

    /// Places a mark after all calls so far, unless there are too many. Its event is reached with them.
    fn place(
        &mut self,
        watchdog: &Watchdog,
        which: usize,
        stream: &Stream,
        at: Instant,
    ) -> Result<Option<Arc<Event>>> {
        if which != COMPUTE {
            let event = Arc::new(Event::new(stream, false)?);
            event.record(stream)?;
            watchdog.report_mark(which, Arc::clone(&event), false);
            return Ok(Some(event));
        }
        let event = match watchdog.free_mark() {
            Some(event) if Arc::strong_count(&event) == 1 => event,
            // The timer still reads it: another event replaces it.
            Some(_) => Arc::new(Event::new(stream, false)?),
            None if self.made >= MAX_MARKS => return Ok(None),
            None => {
                self.made += 1;
                Arc::new(Event::new(stream, false)?)
            }
        };
        event.record(stream)?;
        watchdog.report_mark(which, Arc::clone(&event), true);
        self.newest = Some(at);
        Ok(Some(event))
    }
}

/// Returns the error of a call that the library rejected.
fn refused(watchdog: &Watchdog, error: Error) -> Error {
    if error.is_recoverable() {
        return error;
    }
    watchdog.status().failure_within(FAILURE_GRACE).unwrap_or(error)
}

impl Backend for StreamGroup {
    fn kind(&self) -> BackendKind {
        BackendKind::Nccl
    }

    fn submit(&mut self, mut call: Call<'_>) -> Result<Completion> {
        let completion = self.enqueue(&mut call, COMPUTE)?;
        if call.fingerprint.operation == Operation::Barrier && !completion.captured {
            let (watchdog, end) = (&self.watchdog, &self.ends[COMPUTE]);
            end.record(&self.streams[COMPUTE])?;
            let group = &watchdog.status().members.group;
            let what = || format!("call {} of group `{group}`, barrier,", call.sequence);
            watchdog.wait(what, None, call.deadline, || Ok(end.is_done()?))?;
        }
        Ok(completion)
    }

    fn paths(&self) -> PathTable {
        self.communicator.paths.clone()
    }

    fn force(&mut self, path: Option<Path>) -> Result<()> {
        self.communicator.paths.force(path)
    }

    fn fuses_add_norm(&self, dtype: DType, count: usize, columns: usize) -> bool {
        self.communicator.fuses_add_norm(dtype, count, columns)
    }

    fn abort(&mut self, why: &Error) {
        self.watchdog.abort(why);
    }
}

impl Drop for StreamGroup {
    fn drop(&mut self) {
        // This comes before memory is freed, which waits for the GPU: a call whose peers never arrived ends only with the
        // communicator.
        let Self { streams, has_own_kernels, watchdog, .. } = self;
        watchdog.close_when(|| {
            for stream in streams.iter().filter(|_| *has_own_kernels) {
                if !stream.is_capturing()? && !stream.is_idle()? {
                    return Ok(false);
                }
            }
            Ok(true)
        });
    }
}

/// Starts to watch a group: its members, which these channels connect (none for this rank itself), and what moves its data.
pub(crate) fn watch(
    status: &Arc<Status>,
    channels: Vec<Option<Channel>>,
    monitored: Monitored,
    device: &Device,
) -> Result<Watchdog> {
    Watchdog::spawn(Arc::clone(status), ControlMesh::new(channels), monitored, device.stream().clone())
}

/// Orders a call after other uses of its slices of cudarc, on the stream `on`. Work enqueued there until the result is dropped uses
/// them.
fn order<'s, 'a: 's>(
    input: Option<&mut View<'a>>,
    output: Option<&mut ViewMut<'a>>,
    compute: &Stream,
    on: &'s Stream,
) -> Result<[Option<SyncOnDrop<'s>>; 2]> {
    let slices = [input.as_ref().and_then(|i| i.slice()), output.as_ref().and_then(|o| o.as_view().slice())];
    if slices.iter().all(Option::is_none) {
        return Ok([None, None]);
    }
    // A rejected slice has no effects: the group stays usable.
    slices.into_iter().flatten().try_for_each(|slice| tracked::check(slice, compute)).map_err(
        |e| match e {
            DeviceError::Invalid(reason) => Error::Invalid(reason),
            other => other.into(),
        },
    )?;
    let ordered = [
        input.and_then(|input| input.order(on.cudarc())),
        output.and_then(|output| output.order(on.cudarc())),
    ];
    tracked::outcome(on)?;
    Ok(ordered)
}

/// Executes the only call of a group of one that has work: copies its input to its output, on the compute stream.
pub(crate) fn copy<'a>(device: &Device, mut input: View<'a>, mut output: ViewMut<'a>) -> Result<()> {
    let stream = device.stream();
    let _until_enqueued = order(Some(&mut input), Some(&mut output), stream, stream)?;
    if let (Some(from), Some(to)) = (input.device(), output.device()) {
        // SAFETY: both are views of allocated memory of equal length, and the copy is in stream order.
        unsafe { stream.copy(to.address, from.address, from.bytes) }?;
    }
    Ok(())
}

/// Tells the members that were reached why this rank gives up a group that it could not connect: otherwise they would see a lost
/// rank, once they listen.
pub(crate) fn decline(channels: Vec<Option<Channel>>, why: &Error) {
    let mut mesh = ControlMesh::new(channels);
    mesh.broadcast(&ControlMessage::Aborted(why.to_string()));
    mesh.close(HEARD);
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, TcpListener, TcpStream};

    use super::control_mesh::PeerEvent;
    use super::*;
    use crate::testing::LATE;
    use crate::types::rank::Rank;

    #[test]
    fn a_member_that_was_reached_hears_why_another_cannot_connect() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let mine = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let theirs = listener.accept().unwrap().0;
        let [mine, theirs] = [mine, theirs].map(|stream| Some(Channel::clear(stream).unwrap()));
        let (what, waited) = ("connecting group `g`".into(), Duration::from_secs(3));
        let error = Error::Timeout { what, waited, missing: vec![Rank(2)] };
        let mut mesh = ControlMesh::new(vec![None, theirs]);
        // It was already sent when the other rank gives up, and not read.
        mesh.broadcast(&ControlMessage::Hello);
        decline(vec![mine, None, None], &error);
        let heard = mesh.listen(LATE);
        assert_eq!(
            heard[0],
            (1, PeerEvent::Message(ControlMessage::Aborted(error.to_string()))),
            "{heard:?}"
        );
    }
}

//! Serves a [`Core`] over gRPC: authenticates and bounds connections, passes events to the core and sends its replies.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use bytes::Bytes;
use ryzanstein_config::RendezvousConfig;
use ryzanstein_process_group::security::Security;
use ryzanstein_process_group::{Epoch, Rank, Secret};
use tokio::sync::{Notify, oneshot};
use tonic::{Request, Response, Status};

use super::acceptor::{Acceptor, ConnectionCounts};
use super::codec;
use super::core::{Action, Core, Event, Refusal, Reply, Report, RequestId, Time};
use super::roster_body;
use crate::control as wire;
use crate::control::control_server::{Control, ControlServer};
use crate::status::wire as wire_status;
use ryzanstein_process_group::RuntimeThread;

/// Maximum length in bytes of the report of a heartbeat that is kept: one of 64 groups with long names.
const LONGEST_REPORT: usize = 64 << 10;

/// The last heartbeat of a rank.
#[derive(Clone, Debug)]
pub struct Heartbeat {
    /// Time of its arrival.
    pub heard: Instant,
    /// Its contents.
    pub report: Arc<wire_status::Report>,
}

/// A rendezvous server. It stops when dropped.
#[derive(Debug)]
pub struct Server {
    shared: Arc<Shared>,
    address: SocketAddr,
    // Last, so that its tasks outlive everything that uses them.
    _runtime: RuntimeThread,
}

impl Server {
    /// Serves on a listener that is already bound.
    ///
    /// # Errors
    /// Fails when the operating system gives no thread, or the listener cannot be used.
    pub fn start(
        listener: TcpListener,
        secret: Secret,
        security: Security,
        world_size: u32,
        epoch: Epoch,
        config: &RendezvousConfig,
    ) -> io::Result<Self> {
        let address = listener.local_addr()?;
        listener.set_nonblocking(true)?;
        let counts: Arc<ConnectionCounts> = Arc::default();
        let shared = Arc::new(Shared {
            state: Mutex::new(State {
                core: Core::new(world_size, crate::VERSION, epoch),
                replies: HashMap::new(),
                requests_made: 0,
                roster: None,
                beats: BTreeMap::new(),
            }),
            started: Instant::now(),
            deadline_added: Notify::new(),
            counts: Arc::clone(&counts),
        });
        let runtime = RuntimeThread::start("ryz-rendezvous")?;
        let listener = {
            // A tokio listener belongs to the runtime in whose context it is created.
            let _context = runtime.handle().enter();
            tokio::net::TcpListener::from_std(listener)?
        };
        let service = ControlServer::new(Service(Arc::clone(&shared)))
            .max_decoding_message_size(config.max_message.get().as_usize());
        runtime.handle().spawn(Acceptor::new(secret, security, config, counts, service).run(listener));
        runtime.handle().spawn(Arc::clone(&shared).run_timer());
        Ok(Self { shared, address, _runtime: runtime })
    }

    /// Returns the address of the listener.
    pub const fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns the number of connections refused because they did not prove in time that they know the secret, and of requests
    /// of another epoch.
    pub fn refused(&self) -> u64 {
        self.shared.counts.refused()
    }

    /// Returns the number of authenticated connections.
    pub fn connections(&self) -> usize {
        self.shared.counts.connections()
    }

    /// Returns the last heartbeat of each rank that has sent one in this epoch.
    pub fn beats(&self) -> BTreeMap<Rank, Heartbeat> {
        self.shared.state().beats.clone()
    }

    /// Starts a new epoch. Requests of the old one are refused from now on.
    pub fn advance(&self, epoch: Epoch) {
        self.shared.tell(Event::NewEpoch(epoch));
        self.shared.state().beats.clear();
    }

    /// Tells every rank that waits, now or later, that the job failed, and the reason.
    pub fn fail(&self, why: &str) {
        self.shared.tell(Event::JobFailed(why.to_owned()));
    }

    /// Handles the exit of a rank's process. If the rank has not joined, the ranks that wait for it are told.
    pub fn rank_exited(&self, rank: Rank, how: &str) {
        self.shared.tell(Event::ProcessExited(rank, how.to_owned()));
    }

    /// Returns true if all ranks have joined in this epoch.
    pub fn joined(&self) -> bool {
        self.shared.state().core.joined().is_some()
    }

    /// Returns the number of ranks that have joined and wait for the others.
    pub(super) fn joining(&self) -> usize {
        self.shared.state().core.joining()
    }

    /// Returns a counter of the store; 0 if it does not exist.
    pub(crate) fn counter(&self, key: &str) -> i64 {
        self.shared.state().core.counter(key)
    }

    /// Returns a launcher's value in the store.
    pub(crate) fn value(&self, key: &str) -> Option<Bytes> {
        self.shared.state().core.value(key)
    }

    /// Sets a launcher's value in the store.
    pub(crate) fn put(&self, key: &str, value: String) {
        let epoch = self.shared.state().core.epoch();
        // Requests count from 1: nobody waits for the reply to this one.
        self.shared.tell(Event::Set(RequestId(0), epoch, key.to_owned(), value.into()));
    }

    /// Returns the report of this rank from before it gave up.
    pub fn report(&self, rank: Rank) -> Option<Report> {
        self.shared.state().core.reports().get(&rank).cloned()
    }

    /// Returns the first report of every rank that made one, in rank order.
    pub fn reports(&self) -> Vec<(Rank, Report)> {
        self.shared.state().core.reports().iter().map(|(rank, report)| (*rank, report.clone())).collect()
    }
}

#[derive(Debug)]
struct State {
    core: Core,
    replies: HashMap<RequestId, oneshot::Sender<Result<Reply, Refusal>>>,
    requests_made: u64,
    /// The encoded roster, the same bytes for every rank.
    roster: Option<Bytes>,
    /// The heartbeats of this epoch.
    beats: BTreeMap<Rank, Heartbeat>,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    started: Instant,
    /// Notified when a deadline has been added.
    deadline_added: Notify,
    counts: Arc<ConnectionCounts>,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now(&self) -> Time {
        self.started.elapsed()
    }

    fn tell(&self, event: Event) {
        let now = self.now();
        let mut state = self.state();
        let actions = state.core.handle(now, event);
        state.perform(actions);
    }

    async fn run_timer(self: Arc<Self>) {
        loop {
            let next = self.state().core.next_deadline();
            let due = async {
                match next {
                    Some(time) => tokio::time::sleep_until((self.started + time).into()).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = due => self.tell(Event::Tick),
                () = self.deadline_added.notified() => {}
            }
        }
    }

    /// Passes a request to the core and waits for its reply. If the client disconnects, this future is dropped, and the core is
    /// notified.
    async fn ask(self: &Arc<Self>, event: impl FnOnce(RequestId, Time) -> Event) -> Result<Reply, Refusal> {
        let (reply, answer) = oneshot::channel();
        let now = self.now();
        let request = {
            let mut state = self.state();
            state.requests_made += 1;
            let request = RequestId(state.requests_made);
            state.replies.insert(request, reply);
            let actions = state.core.handle(now, event(request, now));
            state.perform(actions);
            request
        };
        self.deadline_added.notify_one();
        let pending = PendingRequest { shared: self, request };
        let answer = answer.await;
        drop(pending);
        let answer =
            answer.unwrap_or_else(|_| Err(Refusal::Refused("the rendezvous is shutting down".into())));
        answer.inspect_err(|refusal| self.count(refusal))
    }

    fn count(&self, refusal: &Refusal) {
        if matches!(refusal, Refusal::Epoch(_)) {
            self.counts.other_epoch();
        }
    }
}

impl Shared {
    /// Replaces the rank's last heartbeat.
    fn keep(&self, epoch: Epoch, rank: Rank, report: &[u8]) -> Result<(), Refusal> {
        let heard = Instant::now();
        if report.len() > LONGEST_REPORT {
            let bytes = report.len();
            return Err(Refusal::Invalid(format!(
                "a heartbeat of {bytes} bytes; at most {LONGEST_REPORT} are kept"
            )));
        }
        let report = serde_json::from_slice(report).map_err(|why| {
            Refusal::Invalid(format!("a heartbeat of rank {rank} that is no report: {why}"))
        })?;
        let mut state = self.state();
        let has_joined = state.core.joined().is_some_and(|joined| rank.index() < joined.roster.members.len());
        let why = || format!("a heartbeat of rank {rank} in epoch {epoch}, which is not in the job");
        if epoch != state.core.epoch() {
            return Err(Refusal::Epoch(why()));
        }
        if !has_joined {
            return Err(Refusal::Refused(why()));
        }
        state.beats.insert(rank, Heartbeat { heard, report: Arc::new(report) });
        Ok(())
    }
}

impl State {
    fn perform(&mut self, actions: Vec<Action>) {
        for (request, answer) in actions {
            if matches!(answer, Ok(Reply::Rank(_))) {
                self.roster = None;
            }
            if let Some(reply) = self.replies.remove(&request) {
                let _ = reply.send(answer);
            }
        }
    }
}

/// Notifies the core if the client disconnects before the reply.
struct PendingRequest<'a> {
    shared: &'a Shared,
    request: RequestId,
}

impl Drop for PendingRequest<'_> {
    fn drop(&mut self) {
        let waited = self.shared.state().replies.remove(&self.request).is_some();
        if waited {
            self.shared.tell(Event::Disconnected(self.request));
        }
    }
}

pub(super) struct Service(Arc<Shared>);

/// The gRPC service of the rendezvous.
pub(super) type RendezvousService = ControlServer<Service>;

fn done(answer: Result<Reply, Refusal>) -> Response<wire::Done> {
    Response::new(wire::Done { refusal: answer.err().map(Into::into) })
}

#[tonic::async_trait]
impl Control for Service {
    async fn join(&self, request: Request<wire::JoinRequest>) -> Result<Response<wire::JoinReply>, Status> {
        let answer = match codec::join(request.into_inner(), self.0.now()) {
            Ok(join) => self.0.ask(|id, _| Event::Join(id, join)).await,
            Err(refusal) => Err(refusal),
        };
        let refusal = match answer {
            Ok(Reply::Rank(rank)) => {
                let mut state = self.0.state();
                let State { core, roster, .. } = &mut *state;
                match core.joined() {
                    Some(joined) => {
                        let encoded = roster.get_or_insert_with(|| codec::encode(joined)).clone();
                        return Ok(roster_body::reply(rank, encoded));
                    }
                    // A new epoch has begun since the core replied.
                    None => Refusal::Refused("the job has moved on to another epoch".into()),
                }
            }
            Ok(_) => return Err(Status::internal("a join was answered by something else")),
            Err(refusal) => refusal,
        };
        Ok(Response::new(wire::JoinReply { refusal: Some(refusal.into()), ..wire::JoinReply::default() }))
    }

    async fn set(&self, request: Request<wire::SetRequest>) -> Result<Response<wire::Done>, Status> {
        let wire::SetRequest { epoch, key, value } = request.into_inner();
        Ok(done(self.0.ask(|id, _| Event::Set(id, Epoch(epoch), key, value)).await))
    }

    async fn get(&self, request: Request<wire::GetRequest>) -> Result<Response<wire::GetReply>, Status> {
        let wire::GetRequest { epoch, key, timeout_ms } = request.into_inner();
        let answer =
            self.0.ask(|id, now| Event::Get(id, Epoch(epoch), key, codec::deadline(now, timeout_ms))).await;
        match answer {
            Ok(Reply::Value(value)) => Ok(Response::new(wire::GetReply { refusal: None, value })),
            Ok(_) => Err(Status::internal("a get was answered by something else")),
            Err(refusal) => Ok(Response::new(wire::GetReply {
                refusal: Some(refusal.into()),
                ..wire::GetReply::default()
            })),
        }
    }

    async fn add(&self, request: Request<wire::AddRequest>) -> Result<Response<wire::AddReply>, Status> {
        let wire::AddRequest { epoch, key, amount } = request.into_inner();
        match self.0.ask(|id, _| Event::Add(id, Epoch(epoch), key, amount)).await {
            Ok(Reply::Sum(value)) => Ok(Response::new(wire::AddReply { refusal: None, value })),
            Ok(_) => Err(Status::internal("an add was answered by something else")),
            Err(refusal) => Ok(Response::new(wire::AddReply { refusal: Some(refusal.into()), value: 0 })),
        }
    }

    async fn report(&self, request: Request<wire::ReportRequest>) -> Result<Response<wire::Done>, Status> {
        let wire::ReportRequest { epoch, rank, cause, last_call, caused_by } = request.into_inner();
        let report = Report { cause, last_call, caused_by: caused_by.map(Rank) };
        Ok(done(self.0.ask(|id, _| Event::Report(id, Epoch(epoch), Rank(rank), report)).await))
    }
    async fn beat(&self, request: Request<wire::BeatRequest>) -> Result<Response<wire::Done>, Status> {
        let wire::BeatRequest { epoch, rank, report } = request.into_inner();
        let kept = self.0.keep(Epoch(epoch), Rank(rank), &report);
        Ok(done(kept.inspect_err(|refusal| self.0.count(refusal)).map(|()| Reply::Done)))
    }
}

//! HTTP on rank 0: requests become jobs in the engine's queue, and its events become answers.

use std::convert::Infallible;
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, TrySendError};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{FromRequest as _, Request as Incoming, State};
use axum::http::{Method, StatusCode, Uri, header};
use axum::response::{IntoResponse as _, Response};
use axum::routing::{get, post};
use axum::serve::{Listener as _, ListenerExt as _};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use rustix::net::sockopt::set_tcp_user_timeout;
use ryzanstein_tensor_parallel::{ChatTemplate, ChatTime, Error, Tokenizer};
use serde_json::json;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{Semaphore, mpsc, watch};
use tokio::time::{sleep, timeout};
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::UnboundedReceiverStream;

use crate::api::{Form, Kind, Prompt, Refusal, Request, as_json, seconds_since_1970};
use crate::engine::{Event, Job};

/// Data to check requests against, and the queue of jobs.
#[derive(Debug)]
pub(crate) struct App {
    pub(crate) model: String,
    pub(crate) tokenizer: Arc<Tokenizer>,
    /// `None`: the model does not chat.
    pub(crate) template: Option<ChatTemplate>,
    pub(crate) vocabulary: usize,
    /// Strings that end every answer.
    pub(crate) stop_strings: Vec<String>,
    /// The most positions of a sequence.
    pub(crate) context: usize,
    pub(crate) queue: SyncSender<Job>,
}

/// SIGTERM and SIGINT, which no longer end this process.
#[derive(Debug)]
pub(crate) struct StopSignals(Signal, Signal);

impl StopSignals {
    /// From now on. Needs a tokio runtime.
    pub(crate) fn catch() -> std::io::Result<Self> {
        Ok(Self(signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?))
    }

    async fn first(mut self) {
        tokio::select! {
            _ = self.0.recv() => {}
            _ = self.1.recv() => {}
        }
    }
}

/// Most connections at a time; further clients wait. Far below the usual limit on open files.
const CONNECTIONS: usize = 512;

/// Time for a client to send the head of a request, and then its body, or to read more of its answer. Then its
/// connection ends, and the next client gets its place.
const PATIENCE: Duration = Duration::from_secs(10);

/// Time for clients to fetch their last events when the engine has ended.
const LAST_EVENTS: Duration = Duration::from_millis(500);

/// Serves until a signal comes; then accepts nothing more and finishes what runs, at most for `drain`. Then the queue is
/// closed, which the engine sees. If the engine ends first, `engine` is closed, and open answers end with its error.
pub(crate) async fn serve(
    listener: TcpListener,
    app: App,
    signals: StopSignals,
    engine: watch::Receiver<()>,
    drain: Duration,
) -> std::io::Result<()> {
    listener.set_nonblocking(true)?;
    let mut listener = tokio::net::TcpListener::from_std(listener)?.tap_io(|connection| {
        // A token is less than a packet, and must not wait for the next one.
        let _ = connection.set_nodelay(true);
        let _ = set_tcp_user_timeout(&*connection, PATIENCE.as_millis() as u32);
    });
    let router = Router::new()
        .route("/health", get(async || as_json(&json!({ "status": "ok" }))))
        .route("/v1/models", get(models))
        .route("/v1/completions", post(completion))
        .route("/v1/chat/completions", post(chat))
        .fallback(unknown)
        .method_not_allowed_fallback(wrong_method)
        .with_state(Arc::new(app));
    let service = TowerToHyperService::new(router);
    let mut http = http1::Builder::new();
    // A client may close its side behind its request. That looks like leaving, which only a write can tell apart.
    http.timer(TokioTimer::new()).header_read_timeout(PATIENCE).half_close(true);
    let connections = GracefulShutdown::new();
    let places = Arc::new(Semaphore::new(CONNECTIONS));
    let accept = async {
        while let Ok(place) = Arc::clone(&places).acquire_owned().await {
            let (stream, _) = listener.accept().await;
            let connection = http.serve_connection(TokioIo::new(stream), service.clone());
            let connection = connections.watch(connection);
            tokio::spawn(async move {
                // An error is the client's: it has left, or lost the server's patience.
                let _ = connection.await;
                drop(place);
            });
        }
    };
    tokio::select! {
        () = accept => {}
        () = signals.first() => tracing::info!("stopping: {drain:?} for what runs"),
        () = ended(engine.clone()) => {}
    }
    drop(listener);
    tokio::select! {
        () = connections.shutdown() => return Ok(()),
        () = sleep(drain) => {}
        () = async { ended(engine).await; sleep(LAST_EVENTS).await } => {}
    }
    tracing::warn!("some clients have not got their whole answers in time: dropped");
    Ok(())
}

/// Waits until the engine has ended.
async fn ended(mut engine: watch::Receiver<()>) {
    while engine.changed().await.is_ok() {}
}

async fn models(State(app): State<Arc<App>>) -> Response {
    let model = json!({
        "id": app.model, "object": "model", "created": seconds_since_1970(), "owned_by": "ryzanstein",
        "max_model_len": app.context,
    });
    as_json(&json!({ "object": "list", "data": [model] }))
}

async fn unknown(uri: Uri) -> Refusal {
    let known = "/health, /v1/models, /v1/completions and /v1/chat/completions";
    Refusal::new(StatusCode::NOT_FOUND, None, format!("there is no {}; see {known}", uri.path()))
}

async fn wrong_method(method: Method, uri: Uri) -> Refusal {
    Refusal::new(StatusCode::METHOD_NOT_ALLOWED, None, format!("{} does not take {method}", uri.path()))
}

async fn completion(State(app): State<Arc<App>>, request: Incoming) -> Result<Response, Refusal> {
    app.answer(Kind::Completion, request).await
}

async fn chat(State(app): State<Arc<App>>, request: Incoming) -> Result<Response, Refusal> {
    app.answer(Kind::Chat, request).await
}

impl App {
    async fn answer(&self, kind: Kind, request: Incoming) -> Result<Response, Refusal> {
        let late = |_| {
            Refusal::new(StatusCode::REQUEST_TIMEOUT, None, "the body of the request did not come in time")
        };
        let body = timeout(PATIENCE, Bytes::from_request(request, &())).await.map_err(late)?;
        let body = body.map_err(|error| Refusal::new(error.status(), None, error.body_text()))?;
        let request = Request::read(&body, &self.model)?;
        let (sender, mut events) = mpsc::unbounded_channel();
        self.enqueue(self.job(kind, &request, sender)?)?;
        let form = Form::new(kind, &self.model);
        // The head of the answer waits for its first event, so a request that fails at once has the status for it.
        let first = match events.recv().await {
            Some(Event::Failed(message)) => return Err(Refusal::failed(message)),
            Some(first) => first,
            None => return Err(Refusal::failed("the server has stopped before it could answer")),
        };
        if request.is_streamed() {
            Ok(stream(form, first, events, request.wants_usage()))
        } else {
            whole(&form, first, events).await
        }
    }

    /// A checked request.
    fn job(
        &self,
        kind: Kind,
        request: &Request,
        events: mpsc::UnboundedSender<Event>,
    ) -> Result<Job, Refusal> {
        let prompt = self.prompt(kind, request)?;
        if prompt.is_empty() || request.max_tokens == Some(0) {
            return Err(Refusal::invalid("the prompt and max_tokens must be at least one token"));
        }
        let room = self.context.saturating_sub(prompt.len());
        let usual = match kind {
            Kind::Completion => room.min(16),
            Kind::Chat => room,
        };
        let max_tokens = request.max_tokens.unwrap_or(usual.max(1));
        if max_tokens > room {
            let message = format!(
                "the prompt has {} tokens and the answer at most {max_tokens}, together more than the {} of a sequence; \
                 shorten the prompt, or lower max_tokens",
                prompt.len(),
                self.context
            );
            return Err(Refusal::new(StatusCode::BAD_REQUEST, Some("context_length_exceeded"), message));
        }
        let stop = [request.stop(), self.stop_strings.clone()].concat();
        Ok(Job { max_tokens, sampler: request.sampler(&prompt)?, stop, events, prompt })
    }

    fn prompt(&self, kind: Kind, request: &Request) -> Result<Vec<u32>, Refusal> {
        let tokens = match (kind, request) {
            (Kind::Completion, Request { prompt: Some(prompt), messages: None, .. }) => match prompt {
                Prompt::Text(text) => self.tokenizer.encode(text)?,
                Prompt::Tokens(tokens) => tokens.clone(),
            },
            (Kind::Chat, Request { prompt: None, messages: Some(messages), .. }) => {
                let template = self.template.as_ref().ok_or_else(|| {
                    Refusal::invalid("this model has no chat template; use /v1/completions")
                })?;
                let text = template.render(messages, ChatTime::now()).map_err(Error::from)?;
                self.tokenizer.encode_raw(&text)?
            }
            (Kind::Completion, _) => {
                return Err(Refusal::invalid("a completion needs `prompt`, and no `messages`"));
            }
            (Kind::Chat, _) => return Err(Refusal::invalid("a chat needs `messages`, and no `prompt`")),
        };
        match tokens.iter().find(|token| **token as usize >= self.vocabulary) {
            Some(token) => Err(Refusal::invalid(format!(
                "token {token} of the prompt is not in the vocabulary of {}",
                self.vocabulary
            ))),
            None => Ok(tokens),
        }
    }

    fn enqueue(&self, job: Job) -> Result<(), Refusal> {
        self.queue.try_send(job).map_err(|error| match error {
            TrySendError::Full(_) => Refusal::new(
                StatusCode::TOO_MANY_REQUESTS,
                Some("queue_full"),
                "too many requests are waiting; try again later",
            ),
            TrySendError::Disconnected(_) => Refusal::failed("the engine has stopped"),
        })
    }
}

/// Server-sent events, as they come.
fn stream(form: Form, first: Event, rest: mpsc::UnboundedReceiver<Event>, wants_usage: bool) -> Response {
    let mut is_first = true;
    let events = tokio_stream::once(first).chain(UnboundedReceiverStream::new(rest));
    let frames = events.map(move |event| {
        let frames = frames(&form, event, std::mem::take(&mut is_first), wants_usage);
        Ok::<_, Infallible>(frames)
    });
    ([(header::CONTENT_TYPE, "text/event-stream")], Body::from_stream(frames)).into_response()
}

fn frames(form: &Form, event: Event, is_first: bool, wants_usage: bool) -> String {
    match event {
        Event::Text(text) => format!("data: {}\n\n", form.piece(&text, is_first, None)),
        Event::End(finish, usage) => {
            let last = form.piece("", is_first, Some(finish));
            let usage = if wants_usage { format!("data: {}\n\n", form.usage(usage)) } else { String::new() };
            format!("data: {last}\n\n{usage}data: [DONE]\n\n")
        }
        // The head has gone out with status 200, so clients look for this.
        Event::Failed(message) => format!("data: {}\n\n", Refusal::failed(message).json()),
    }
}

/// The answer in one piece.
async fn whole(
    form: &Form,
    first: Event,
    mut rest: mpsc::UnboundedReceiver<Event>,
) -> Result<Response, Refusal> {
    let (mut text, mut next) = (String::new(), Some(first));
    loop {
        match next {
            Some(Event::Text(piece)) => text += &piece,
            Some(Event::End(finish, usage)) => return Ok(as_json(&form.whole(&text, finish, usage))),
            Some(Event::Failed(message)) => return Err(Refusal::failed(message)),
            None => return Err(Refusal::failed("the server has stopped before it could answer")),
        }
        next = rest.recv().await;
    }
}

//! The OpenAI API as data: what clients send, what they get, and what they are refused. No socket and no model.

use std::num::NonZeroUsize;
use std::time::{SystemTime, UNIX_EPOCH};

use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use ryzanstein_tensor_parallel::generate::Sampler;
use ryzanstein_tensor_parallel::{Error, Message, Penalties, Sampling};
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::{Value, json};

use crate::engine::{Finish, Usage};

/// A completion or a chat. A field that is not here would change the answer, so it is refused and not ignored.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Request {
    pub(crate) model: Option<String>,
    /// Of a completion.
    pub(crate) prompt: Option<Prompt>,
    /// Of a chat.
    pub(crate) messages: Option<Vec<Message>>,
    #[serde(alias = "max_completion_tokens")]
    pub(crate) max_tokens: Option<usize>,
    temperature: Option<f64>,
    top_p: Option<f64>,
    /// As vLLM has it: 0 for all tokens.
    top_k: Option<usize>,
    seed: Option<i64>,
    presence_penalty: Option<f32>,
    frequency_penalty: Option<f32>,
    stop: Option<Stop>,
    n: Option<u32>,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    #[serde(rename = "user")]
    _user: Option<IgnoredAny>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "expected a text or an array of token ids")]
pub(crate) enum Prompt {
    Text(String),
    Tokens(Vec<u32>),
}

#[derive(Clone, Debug, Deserialize)]
#[serde(untagged, expecting = "expected a text or an array of texts")]
enum Stop {
    One(String),
    Several(Vec<String>),
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct StreamOptions {
    include_usage: Option<bool>,
}

/// The most texts in `stop`, and the most bytes of them together: each is looked for at every token, while other requests
/// wait.
const STOPS: usize = 16;
const STOP_BYTES: usize = 1 << 10;

impl Request {
    /// Reads the body of a request for this model.
    pub(crate) fn read(body: &[u8], model: &str) -> Result<Self, Refusal> {
        let request: Self =
            serde_json::from_slice(body).map_err(|error| Refusal::invalid(error.to_string()))?;
        match &request.model {
            Some(other) if other != model => Err(Refusal::new(
                StatusCode::NOT_FOUND,
                Some("model_not_found"),
                format!("there is no model `{other}`; this server has `{model}`"),
            )),
            _ if request.n.unwrap_or(1) != 1 => {
                Err(Refusal::invalid("n must be 1; send the request several times"))
            }
            _ if request.stop().iter().map(String::len).sum::<usize>() > STOP_BYTES
                || request.stop().len() > STOPS =>
            {
                Err(Refusal::invalid(format!(
                    "stop may have at most {STOPS} texts, of at most {STOP_BYTES} bytes together"
                )))
            }
            _ => Ok(request),
        }
    }

    /// Returns the sampler for a prompt. Without a seed, one at random.
    pub(crate) fn sampler(&self, prompt: &[u32]) -> Result<Sampler, Refusal> {
        let temperature = self.temperature.unwrap_or(1.0);
        let sampling = Sampling::Random {
            temperature,
            top_p: self.top_p.unwrap_or(1.0),
            top_k: self.top_k.and_then(NonZeroUsize::new),
            seed: self.seed.map_or_else(rand::random, i64::cast_unsigned),
        };
        let sampling = if temperature == 0.0 { Sampling::Greedy } else { sampling };
        let penalties = Penalties {
            presence: self.presence_penalty.unwrap_or(0.0),
            frequency: self.frequency_penalty.unwrap_or(0.0),
            ..Penalties::default()
        };
        let sampler = Sampler::new(sampling).and_then(|sampler| sampler.with_penalties(penalties, prompt));
        sampler.map_err(Refusal::from)
    }

    /// The texts before which the answer ends.
    pub(crate) fn stop(&self) -> Vec<String> {
        match self.stop.clone() {
            None => Vec::new(),
            Some(Stop::One(text)) => vec![text],
            Some(Stop::Several(texts)) => texts,
        }
    }

    pub(crate) fn is_streamed(&self) -> bool {
        self.stream.unwrap_or(false)
    }

    /// Returns true if the usage is wanted at the end of a stream.
    pub(crate) fn wants_usage(&self) -> bool {
        self.stream_options.as_ref().and_then(|options| options.include_usage).unwrap_or(false)
    }
}

/// The reason for a refusal.
#[derive(Debug)]
pub(crate) struct Refusal {
    status: StatusCode,
    code: Option<&'static str>,
    message: String,
}

impl Refusal {
    pub(crate) fn new(status: StatusCode, code: Option<&'static str>, message: impl Into<String>) -> Self {
        Self { status, code, message: message.into() }
    }

    /// The client's fault.
    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, None, message)
    }

    /// The server's fault.
    pub(crate) fn failed(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, None, message)
    }

    pub(crate) fn json(&self) -> Value {
        let kind = match self.status {
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            status if status.is_client_error() => "invalid_request_error",
            _ => "server_error",
        };
        json!({ "error": { "message": self.message, "type": kind, "param": null, "code": self.code } })
    }
}

impl From<Error> for Refusal {
    fn from(error: Error) -> Self {
        Self::invalid(error.to_string())
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        (self.status, as_json(&self.json())).into_response()
    }
}

/// A body of JSON.
pub(crate) fn as_json(value: &Value) -> Response {
    ([(header::CONTENT_TYPE, "application/json")], value.to_string()).into_response()
}

pub(crate) fn seconds_since_1970() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

/// The shape of answers to the two kinds of requests.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    Completion,
    Chat,
}

/// Data common to all parts of one answer.
#[derive(Debug)]
pub(crate) struct Form {
    kind: Kind,
    id: String,
    created: u64,
    model: String,
}

impl Form {
    pub(crate) fn new(kind: Kind, model: &str) -> Self {
        let prefix = if kind == Kind::Chat { "chatcmpl" } else { "cmpl" };
        let id = format!("{prefix}-{:016x}", rand::random::<u64>());
        Self { kind, id, created: seconds_since_1970(), model: model.into() }
    }

    /// The whole answer.
    pub(crate) fn whole(&self, text: &str, finish: Finish, usage: Usage) -> Value {
        let said = match self.kind {
            Kind::Completion => json!({ "text": text }),
            Kind::Chat => json!({ "message": { "role": "assistant", "content": text } }),
        };
        self.object("chat.completion", Some((said, Some(finish))), Some(usage))
    }

    /// A piece of a streamed answer. The first of a chat says who speaks, and the last why it ends.
    pub(crate) fn piece(&self, text: &str, is_first: bool, finish: Option<Finish>) -> Value {
        let said = match (self.kind, is_first) {
            (Kind::Completion, _) => json!({ "text": text }),
            (Kind::Chat, true) => json!({ "delta": { "role": "assistant", "content": text } }),
            (Kind::Chat, false) => json!({ "delta": { "content": text } }),
        };
        self.object("chat.completion.chunk", Some((said, finish)), None)
    }

    /// The usage, behind the pieces of a streamed answer.
    pub(crate) fn usage(&self, usage: Usage) -> Value {
        self.object("chat.completion.chunk", None, Some(usage))
    }

    fn object(&self, of_chat: &str, said: Option<(Value, Option<Finish>)>, usage: Option<Usage>) -> Value {
        let choices = said.into_iter().map(|(mut choice, finish)| {
            choice["index"] = json!(0);
            choice["finish_reason"] = json!(finish);
            choice
        });
        json!({
            "id": self.id,
            "object": if self.kind == Kind::Chat { of_chat } else { "text_completion" },
            "created": self.created,
            "model": self.model,
            "choices": choices.collect::<Vec<_>>(),
            "usage": usage.map(|Usage { prompt, new }| {
                json!({ "prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new })
            }),
        })
    }
}

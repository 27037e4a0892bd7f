//! The example `server` as its users meet it: two processes under `ryz launch`, and clients over HTTP.

mod common;

use std::io::{BufRead as _, BufReader, ErrorKind, Read as _, Write as _};
use std::net::{Shutdown, TcpStream};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Mutex, mpsc};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use ryzanstein_process_group::ProcessGroup;
use ryzanstein_tensor_parallel::{
    ChatTemplate, ChatTime, GenerateOptions, Llama, Message, StopReason, Tokenizer,
};
use ryzanstein_tests::fixtures;
use serde_json::{Value, json};

use crate::common::{LONG, built};

/// Repeats the messages, so that the fixture chats.
const TEMPLATE: &str = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}the ";

/// The fixture with a chat template.
fn model() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for file in ["config.json", "model.safetensors", "tokenizer.json"] {
        std::fs::copy(fixtures::folder("llama-mha").join(file), folder.path().join(file)).unwrap();
    }
    std::fs::write(folder.path().join("chat_template.jinja"), TEMPLATE).unwrap();
    folder
}

/// Two ranks that serve a model.
struct Server {
    launcher: Child,
    address: String,
    /// Their lines on stderr.
    lines: Mutex<mpsc::Receiver<String>>,
    model: tempfile::TempDir,
}

impl Server {
    fn start(flags: &[&str]) -> Self {
        Self::start_in_stages("1", flags)
    }

    fn start_in_stages(stages: &str, flags: &[&str]) -> Self {
        let model = model();
        let mut launcher = Command::new(built("ryz"))
            .args(["launch", "-n", "2", "--"])
            .arg(built("examples/server"))
            .args(["--listen", "127.0.0.1:0", "--model"])
            .arg(model.path())
            .args(flags)
            .env("RYZ_LAYOUT__PIPELINE_PARALLEL", stages)
            .env("RYZ_LAUNCH__GRACE", "40s")
            // Far shorter than a test: an idle server must outlive it.
            .env("RYZ_PROCESS_GROUP__TIMEOUT", "2s")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let stderr = BufReader::new(launcher.stderr.take().unwrap());
        let (sender, lines) = mpsc::channel();
        std::thread::spawn(move || {
            for line in stderr.lines().map_while(Result::ok) {
                let _ = sender.send(line);
            }
        });
        let mut server = Self { launcher, address: String::new(), lines: Mutex::new(lines), model };
        let line = server.wait_for_line("listening on ", LONG).expect("the server listens");
        let (_, address) = line.split_once("listening on ").unwrap();
        server.address = address.split(',').next().unwrap().into();
        server
    }

    /// Waits for a line with this text on stderr.
    fn wait_for_line(&self, text: &str, most: Duration) -> Option<String> {
        let deadline = Instant::now() + most;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let line = self.lines.lock().unwrap().recv_timeout(left).ok()?;
            if line.contains(text) {
                return Some(line);
            }
        }
    }

    /// The process of this rank.
    fn rank(&self, rank: u32) -> Pid {
        let (model, variable) = (self.model.path().to_str().unwrap(), format!("\0RANK={rank}\0"));
        let has = |pid: i32, file: &str, text: &str| {
            let bytes = std::fs::read(format!("/proc/{pid}/{file}")).unwrap_or_default();
            format!("\0{}", String::from_utf8_lossy(&bytes)).contains(text)
        };
        let mut pids = std::fs::read_dir("/proc")
            .unwrap()
            .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<i32>().ok());
        let pid = pids.find(|pid| has(*pid, "cmdline", model) && has(*pid, "environ", &variable));
        Pid::from_raw(pid.expect("the rank runs")).unwrap()
    }

    fn model_name(&self) -> String {
        self.model.path().file_name().unwrap().to_string_lossy().into_owned()
    }

    /// The greedy answer of a single rank: text, number of tokens, and whether the model ended it.
    fn expected(&self, prompt: &str, most: usize) -> (String, usize, bool) {
        let tokenizer = self.tokenizer();
        let mut group = ProcessGroup::loopback(1).remove(0);
        let model = Llama::load(self.model.path(), None, &mut group).unwrap();
        let options = GenerateOptions { max_new_tokens: most, ..GenerateOptions::default() };
        let prompt = tokenizer.encode(prompt).unwrap();
        let answer = model.generate(&prompt, &options, &mut group).unwrap();
        // Decoded behind the prompt, as in a text that goes on.
        let (before, all) = (tokenizer.decode(&prompt).unwrap(), [&prompt[..], &answer.tokens].concat());
        let text = tokenizer.decode(&all).unwrap()[before.len()..].to_owned();
        (text, answer.tokens.len(), matches!(answer.stop, StopReason::End(_)))
    }

    fn tokenizer(&self) -> Tokenizer {
        Tokenizer::open(self.model.path()).unwrap().unwrap()
    }

    fn send(&self, path: &str, body: &str) -> (u16, ureq::Body) {
        self.try_send(path, body).unwrap()
    }

    fn try_send(&self, path: &str, body: &str) -> Result<(u16, ureq::Body), ureq::Error> {
        let agent = ureq::Agent::config_builder().timeout_global(Some(LONG)).http_status_as_error(false);
        let agent = agent.build().new_agent();
        let answer = agent.post(format!("{}{path}", self.address)).send(body)?;
        Ok((answer.status().as_u16(), answer.into_body()))
    }

    /// A connection without a library between, so that a client can do what libraries do not.
    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address.strip_prefix("http://").unwrap()).unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        stream.set_write_timeout(Some(LONG)).unwrap();
        stream
    }

    /// The status and the JSON of an answer in one piece.
    fn ask(&self, path: &str, body: &Value) -> (u16, Value) {
        let (status, mut body) = self.send(path, &body.to_string());
        (status, body.read_json().unwrap())
    }

    /// The events of a streamed answer, without `[DONE]`, which must be the last.
    fn stream(&self, path: &str, body: &Value) -> Vec<Value> {
        let (status, mut body) = self.send(path, &body.to_string());
        assert_eq!(status, 200);
        let text = body.read_to_string().unwrap();
        let events: Vec<_> =
            text.split_terminator("\n\n").map(|event| event.strip_prefix("data: ").unwrap()).collect();
        let (done, events) = events.split_last().unwrap();
        assert_eq!(*done, "[DONE]", "{text}");
        events.iter().map(|event| serde_json::from_str(event).unwrap()).collect()
    }

    /// Asks the launcher to stop, and waits for it.
    fn stop(&mut self) -> ExitStatus {
        kill_process(Pid::from_child(&self.launcher), Signal::TERM).unwrap();
        let deadline = Instant::now() + LONG;
        loop {
            if let Some(status) = self.launcher.try_wait().unwrap() {
                return status;
            }
            assert!(Instant::now() < deadline, "the server does not stop");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // The launcher's end is that of its ranks.
        let _ = self.launcher.kill();
        let _ = self.launcher.wait();
    }
}

fn greedy(prompt: &str, max_tokens: usize) -> Value {
    json!({ "prompt": prompt, "max_tokens": max_tokens, "temperature": 0 })
}

/// The pieces of a streamed completion, joined.
fn text(events: &[Value]) -> String {
    events.iter().filter_map(|event| event["choices"][0]["text"].as_str()).collect()
}

#[test]
fn streams_at_once_have_the_tokens_of_greedy_generation() {
    check_streams(&Server::start(&["--sequences", "2"]));
}

#[test]
fn sequences_that_wait_for_pages_have_the_tokens_of_greedy_generation() {
    check_streams(&Server::start(&["--sequences", "4", "--context", "128", "--positions", "128"]));
}

#[test]
fn passes_that_follow_each_other_have_the_tokens_of_greedy_generation() {
    check_streams(&Server::start(&["--sequences", "3", "--passes", "7"]));
}

#[test]
fn two_pipeline_stages_serve_as_one_does() {
    check_streams(&Server::start_in_stages("2", &["--sequences", "2"]));
}

fn check_streams(server: &Server) {
    let prompts = ["the ring and the tree", "every rank", "the same sum", "hold"];
    std::thread::scope(|scope| {
        for (prompt, most) in prompts.into_iter().zip([60, 40, 20, 1]) {
            scope.spawn(move || {
                let mut body = greedy(prompt, most);
                body["stream"] = json!(true);
                body["stream_options"] = json!({ "include_usage": true });
                let events = server.stream("/v1/completions", &body);
                let (expected, tokens, ended) = server.expected(prompt, most);
                assert_eq!(text(&events), expected, "{prompt}");
                let [.., last, usage] = &events[..] else { panic!("{events:?}") };
                assert_eq!(last["choices"][0]["finish_reason"], if ended { "stop" } else { "length" });
                assert_eq!(usage["usage"]["completion_tokens"], tokens);
            });
        }
    });
}

#[test]
fn a_chat_answers_to_the_text_of_its_template_in_one_piece_and_streamed() {
    let server = Server::start(&[]);
    let messages = json!([{ "role": "user", "content": "the ring" }]);
    let mut body =
        json!({ "model": server.model_name(), "messages": messages, "max_tokens": 12, "temperature": 0 });
    let template = ChatTemplate::open(server.model.path()).unwrap();
    let prompt = template.render(&[Message::user("the ring")], ChatTime::now()).unwrap();
    assert_eq!(prompt, "user the ring the ");
    // Templates have their special tokens; this one has none.
    let tokens = server.tokenizer().encode_raw(&prompt).unwrap();
    let (_, same) =
        server.ask("/v1/completions", &json!({ "prompt": tokens, "max_tokens": 12, "temperature": 0 }));

    let (status, answer) = server.ask("/v1/chat/completions", &body);
    assert_eq!((status, &answer["object"]), (200, &json!("chat.completion")), "{answer}");
    let content = &answer["choices"][0]["message"]["content"];
    assert_eq!(content, &same["choices"][0]["text"]);
    assert_eq!(answer["usage"]["prompt_tokens"], tokens.len());

    body["stream"] = json!(true);
    let events = server.stream("/v1/chat/completions", &body);
    assert_eq!(events[0]["choices"][0]["delta"]["role"], "assistant");
    let pieces = events.iter().filter_map(|event| event["choices"][0]["delta"]["content"].as_str());
    assert_eq!(pieces.collect::<String>(), content.as_str().unwrap());
}

#[test]
fn an_answer_ends_before_a_stop_string_and_a_seed_repeats_it() {
    check_ends(&Server::start(&[]));
}

#[test]
fn an_answer_that_ends_amid_passes_ends_there_and_leaves_its_slot_to_the_next() {
    check_ends(&Server::start(&["--sequences", "1", "--passes", "7"]));
}

fn check_ends(server: &Server) {
    let (whole, ..) = server.expected("the ring", 40);
    // From the middle of the text, so that there is something before it.
    let middle = whole.char_indices().nth(whole.chars().count() / 2).unwrap().0;
    let stop: String = whole[middle..].chars().take(3).collect();
    let mut body = greedy("the ring", 40);
    body["stop"] = json!([stop, "never"]);
    let (_, answer) = server.ask("/v1/completions", &body);
    assert_eq!(answer["choices"][0]["text"], whole[..whole.find(&stop).unwrap()]);
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
    let (_, answer) = server.ask("/v1/completions", &greedy("the ring", 40));
    assert_eq!(answer["choices"][0]["text"], whole);

    let sampled = |seed| {
        let body = json!({ "prompt": "the ring", "max_tokens": 30, "temperature": 2.0, "top_p": 0.95, "top_k": 50,
            "seed": seed, "presence_penalty": 0.5, "frequency_penalty": 0.5 });
        server.ask("/v1/completions", &body).1["choices"][0]["text"].clone()
    };
    assert_eq!(sampled(3), sampled(3));
    assert_ne!(sampled(3), sampled(4));
}

#[test]
fn bad_requests_are_refused_with_what_is_wrong() {
    let server = Server::start(&[]);
    let refused = |path: &str, body: &str, status: u16, words: &str| {
        let (got, mut answer) = server.send(path, body);
        let answer: Value = answer.read_json().unwrap();
        let message = answer["error"]["message"].as_str().unwrap_or_default();
        assert!(got == status && message.contains(words), "{body}: {got} {answer}");
        assert_eq!(answer["error"]["type"], "invalid_request_error", "{body}");
    };
    let completions = "/v1/completions";
    refused(completions, "{", 400, "EOF while parsing");
    refused(completions, "{}", 400, "needs `prompt`");
    refused("/v1/chat/completions", r#"{"prompt":"a"}"#, 400, "needs `messages`");
    refused(completions, r#"{"prompt":"a","model":"other"}"#, 404, "no model `other`");
    refused(completions, r#"{"prompt":"a","logit_bias":{}}"#, 400, "unknown field `logit_bias`");
    refused(completions, r#"{"prompt":["a"]}"#, 400, "array of token ids");
    refused(completions, r#"{"prompt":[100]}"#, 400, "not in the vocabulary of 100");
    refused(completions, r#"{"prompt":[]}"#, 400, "at least one token");
    refused(completions, r#"{"prompt":[1],"max_tokens":0}"#, 400, "at least one token");
    refused(completions, r#"{"prompt":[1,2],"max_tokens":255}"#, 400, "more than the 256");
    let full = json!({ "prompt": vec![1; 256] }).to_string();
    refused(completions, &full, 400, "together more than the 256");
    let (_, answer) = server.ask(completions, &json!({ "prompt": vec![1; 256] }));
    assert_eq!(answer["error"]["code"], "context_length_exceeded", "{answer}");
    let options = r#"{"prompt":"a","stream":true,"stream_options":{"obfuscation":true}}"#;
    refused(completions, options, 400, "unknown field `obfuscation`");
    refused(completions, r#"{"prompt":"a","n":2}"#, 400, "n must be 1");
    for stop in [json!(vec!["a"; 17]), json!("a".repeat(2000))] {
        let body = json!({ "prompt": "a", "stop": stop }).to_string();
        refused(completions, &body, 400, "stop may have at most 16 texts, of at most 1024 bytes together");
    }
    refused(completions, r#"{"prompt":"a","temperature":-1}"#, 400, "must be positive");
    refused(completions, r#"{"prompt":"a","top_p":2}"#, 400, "top-p 2");
    refused(completions, r#"{"prompt":"a","presence_penalty":3}"#, 400, "presence penalty 3");
    refused("/v1/embeddings", "{}", 404, "there is no /v1/embeddings");
    refused("/v1/models", "{}", 405, "does not take POST");

    let (status, answer) = server.ask(completions, &json!({ "prompt": [1, 2], "max_tokens": 254 }));
    assert_eq!(status, 200, "{answer}");
    let models: Value =
        ureq::get(format!("{}/v1/models", server.address)).call().unwrap().into_body().read_json().unwrap();
    assert_eq!(models["data"][0]["id"], server.model_name());
}

/// A long answer, streamed.
fn long() -> Value {
    json!({ "prompt": [1], "max_tokens": 250, "temperature": 0, "stream": true })
}

#[test]
fn a_client_that_leaves_frees_its_slot() {
    let server = Server::start(&["--sequences", "1"]);
    let deadline = Instant::now() + LONG;
    // An answer may be ready before its client is missed, so there may be several tries.
    loop {
        let (status, body) = server.send("/v1/completions", &long().to_string());
        assert_eq!(status, 200);
        drop(body);
        if server.wait_for_line("a client has left after", Duration::from_secs(1)).is_some() {
            break;
        }
        assert!(Instant::now() < deadline, "no client is ever missed");
    }
    let (status, _) = server.ask("/v1/completions", &greedy("the ring", 4));
    assert_eq!(status, 200);
}

/// The bytes of a request for a completion.
fn raw(body: &Value) -> String {
    let body = body.to_string();
    format!("POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n{body}", body.len())
}

#[test]
fn a_client_that_closes_its_side_behind_its_request_gets_the_answer() {
    let server = Server::start(&[]);
    let (expected, ..) = server.expected("the ring", 40);
    for is_streamed in [false, true] {
        let mut body = greedy("the ring", 40);
        body["stream"] = json!(is_streamed);
        let mut client = server.connect();
        client.write_all(raw(&body).as_bytes()).unwrap();
        client.shutdown(Shutdown::Write).unwrap();
        let mut answer = String::new();
        client.read_to_string(&mut answer).unwrap();
        assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
        let events = answer.lines().map(|line| line.strip_prefix("data: ").unwrap_or(line));
        let events: Vec<Value> = events.filter_map(|line| serde_json::from_str(line).ok()).collect();
        assert_eq!(text(&events), expected, "{answer}");
    }
}

#[test]
fn clients_that_send_nothing_hold_up_no_other_and_are_disconnected() {
    let mut server = Server::start(&[]);
    // More than the server has places for.
    let idle: Vec<TcpStream> = (0..600).map(|_| server.connect()).collect();
    // They have begun to send a head and a body.
    let request = raw(&greedy("the ring", 4));
    let partial = [20, request.len() - 1].map(|length| {
        let mut client = server.connect();
        client.write_all(&request.as_bytes()[..length]).unwrap();
        client
    });
    let (status, answer) = server.ask("/v1/completions", &greedy("the ring", 4));
    assert_eq!(status, 200, "{answer}");
    for mut idle in idle {
        assert_eq!(idle.read(&mut [0]).unwrap_or(0), 0, "disconnected");
    }
    for mut partial in partial {
        let mut answer = String::new();
        let _ = partial.read_to_string(&mut answer);
        assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 408"), "{answer}");
    }
    // Nor is the end of the server held up.
    let _idle = server.connect();
    server.stop();
    let lines: Vec<String> = server.lines.lock().unwrap().iter().collect();
    assert!(!lines.iter().any(|line| line.contains("whole answers in time")), "{lines:#?}");
}

#[test]
fn clients_that_read_nothing_hold_up_no_other_and_are_disconnected() {
    let server = Server::start(&["--sequences", "2"]);
    let deaf: Vec<TcpStream> = (0..8)
        .map(|_| {
            let mut client = server.connect();
            client.write_all(raw(&long()).as_bytes()).unwrap();
            client
        })
        .collect();
    // More answers than the buffers of a connection hold.
    let mut flood = server.connect();
    let requests = "GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n".repeat(1000);
    let flooding = std::thread::spawn(move || {
        loop {
            if let Err(error) = flood.write_all(requests.as_bytes()) {
                return error;
            }
        }
    });
    let (status, answer) = server.ask("/v1/completions", &greedy("the ring", 4));
    assert_eq!(status, 200, "{answer}");
    let error = flooding.join().unwrap();
    assert!(
        !matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut),
        "it is disconnected: {error}"
    );
    drop(deaf);
}

#[test]
fn requests_beyond_the_queue_are_refused_and_the_others_answered() {
    let server = Server::start(&["--sequences", "1", "--queue", "1"]);
    let deadline = Instant::now() + LONG;
    loop {
        let statuses: Vec<u16> = std::thread::scope(|scope| {
            let clients: Vec<_> = (0..8)
                .map(|_| {
                    scope.spawn(|| {
                        let (status, mut body) = server.send("/v1/completions", &long().to_string());
                        let text = body.read_to_string().unwrap();
                        assert!(
                            text.contains(if status == 200 { "[DONE]" } else { "queue_full" }),
                            "{status}: {text}"
                        );
                        status
                    })
                })
                .collect();
            clients.into_iter().map(|client| client.join().unwrap()).collect()
        });
        assert!(statuses.iter().all(|status| [200, 429].contains(status)), "{statuses:?}");
        assert!(statuses.contains(&200), "{statuses:?}");
        if statuses.contains(&429) {
            return;
        }
        assert!(Instant::now() < deadline, "the queue is never full");
    }
}

#[test]
fn a_stop_signal_lets_answers_end_and_then_all_ranks_leave() {
    let mut server = Server::start(&[]);
    let (expected, ..) = server.expected("the ring", 200);
    let mut body = greedy("the ring", 200);
    body["stream"] = json!(true);
    // The head comes with the first token, so the request runs.
    let (status, mut answer) = server.send("/v1/completions", &body.to_string());
    let rest = std::thread::spawn(move || answer.read_to_string().unwrap());
    let ended = server.stop();
    assert_eq!(status, 200);
    let rest = rest.join().unwrap();
    assert!(rest.ends_with("data: [DONE]\n\n"), "{rest}");
    let events: Vec<Value> =
        rest.split("data: ").filter_map(|event| serde_json::from_str(event.trim()).ok()).collect();
    assert_eq!(text(&events), expected);
    // 128 and SIGTERM: what the launcher says when it was told to stop and no rank failed.
    assert_eq!(ended.code(), Some(143));
    let lines: Vec<String> = server.lines.lock().unwrap().iter().collect();
    let failures: Vec<_> =
        lines.iter().filter(|line| line.contains("rror") || line.contains("kill")).collect();
    assert!(failures.is_empty(), "{lines:#?}");
}

#[test]
fn a_lost_rank_ends_running_answers_with_an_error_event() {
    let server = Server::start(&["--sequences", "4"]);
    let (began, first) = mpsc::channel();
    let answers: Vec<(u16, String)> = std::thread::scope(|scope| {
        // So long that an answer runs whenever the rank is lost.
        let clients: Vec<_> = (1..=12)
            .map(|n| {
                let (began, server) = (began.clone(), &server);
                let body =
                    json!({ "prompt": [1], "max_tokens": 200 + 3 * n, "temperature": 0, "stream": true });
                scope.spawn(move || {
                    // A slow client may come when the server has gone.
                    let (status, mut answer) = server.try_send("/v1/completions", &body.to_string()).ok()?;
                    let _ = began.send(());
                    Some((status, answer.read_to_string().expect("no connection is reset")))
                })
            })
            .collect();
        first.recv_timeout(LONG).expect("an answer begins");
        kill_process(server.rank(1), Signal::KILL).unwrap();
        clients.into_iter().filter_map(|client| client.join().unwrap()).collect()
    });
    let is_told = |(status, text): &&(u16, String)| *status == 200 && text.contains(r#""server_error""#);
    assert!(answers.iter().any(|answer| is_told(&answer)), "{answers:#?}");
    let is_whole = |(status, text): &(u16, String)| match status {
        200 => text.contains("[DONE]") || text.contains(r#""server_error""#),
        _ => text.contains(r#""server_error""#),
    };
    assert!(answers.iter().all(is_whole), "{answers:#?}");
}

#[test]
fn an_idle_server_outlives_the_deadline_of_its_collectives() {
    let server = Server::start(&[]);
    // More than the deadline of two seconds.
    std::thread::sleep(Duration::from_secs(5));
    let (status, answer) = server.ask("/v1/completions", &greedy("the ring", 4));
    assert_eq!(status, 200, "{answer}");
}

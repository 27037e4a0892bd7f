use std::time::Duration;

use ryzanstein_config::BackendChoice;
use ryzanstein_process_group::{BackendKind, Capability, Cpus};

use ryzanstein_process_group::store::{MAX_KEY, MAX_VALUE};

use super::*;
use ryzanstein_process_group::Candidate;

const VERSION: &str = "1.0";

fn seconds(n: u64) -> Time {
    Duration::from_secs(n)
}

fn candidate(host: &str, pid: u32) -> Candidate {
    Candidate {
        host: host.into(),
        pid,
        cpus: Cpus::default(),
        data_address: None,
        wanted: BackendChoice::Tcp,
        capabilities: vec![Capability::usable(BackendKind::Tcp)],
    }
}

fn joining(rank: Option<u32>, host: &str, world_size: u32) -> Join {
    Join {
        epoch: Some(Epoch(1)),
        world_size,
        version: VERSION.into(),
        deadline: seconds(60),
        participant: Participant {
            rank: rank.map(Rank),
            local_rank: None,
            node_rank: None,
            candidate: candidate(host, 100 + rank.unwrap_or(0)),
        },
    }
}

/// A core, and all its answers so far.
struct Job {
    core: Core,
    requests: u64,
    answers: BTreeMap<RequestId, Result<Reply, Refusal>>,
}

impl Job {
    fn new(world_size: u32) -> Self {
        Self { core: Core::new(world_size, VERSION, Epoch(1)), requests: 0, answers: BTreeMap::new() }
    }

    fn tell(&mut self, now: Time, event: Event) {
        for (request, answer) in self.core.handle(now, event) {
            assert!(self.answers.insert(request, answer).is_none(), "{request:?} was answered twice");
        }
    }

    fn ask(&mut self, now: Time, event: impl FnOnce(RequestId) -> Event) -> RequestId {
        self.requests += 1;
        let request = RequestId(self.requests);
        self.tell(now, event(request));
        request
    }

    fn join(&mut self, now: Time, join: Join) -> RequestId {
        self.ask(now, |request| Event::Join(request, join))
    }

    fn words(&self, request: RequestId) -> &str {
        match &self.answers[&request] {
            Err(
                Refusal::Refused(why)
                | Refusal::Epoch(why)
                | Refusal::Invalid(why)
                | Refusal::Configuration(why)
                | Refusal::Timeout { what: why, .. },
            ) => why,
            other => panic!("granted: {other:?}"),
        }
    }
}

#[test]
fn nobody_is_answered_before_the_last_rank_has_come_and_then_everybody_is() {
    let mut job = Job::new(3);
    let requests: Vec<_> =
        [2, 0, 1].map(|rank| job.join(seconds(rank), joining(Some(rank as u32), "a", 3))).to_vec();
    assert_eq!(job.answers.len(), 3);
    assert_eq!(job.answers[&requests[0]], Ok(Reply::Rank(Rank(2))));
    let joined = job.core.joined().expect("a roster");
    assert_eq!(joined.selection.backend, BackendKind::Tcp);
    assert_eq!(joined.roster.members.iter().map(|m| m.pid).collect::<Vec<_>>(), [100, 101, 102]);
    assert_eq!(job.core.next_deadline(), None);
}

#[test]
fn processes_without_a_rank_get_one_next_to_the_others_of_their_host() {
    let mut job = Job::new(5);
    for host in ["a", "b", "a", "b"] {
        job.join(seconds(0), joining(None, host, 5));
    }
    job.join(seconds(1), joining(Some(1), "c", 5));
    let hosts: Vec<_> = job
        .core
        .joined()
        .expect("a roster")
        .roster
        .members
        .iter()
        .map(|m| (m.host.as_str(), m.local_rank.0))
        .collect();
    assert_eq!(hosts, [("a", 0), ("c", 0), ("a", 1), ("b", 0), ("b", 1)]);
}

#[test]
fn what_does_not_fit_the_job_is_refused_by_name_and_does_not_disturb_the_rest() {
    let mut job = Job::new(2);
    let first = job.join(seconds(0), joining(Some(0), "a", 2));
    let cases = [
        (joining(Some(0), "b", 2), "rank 0 has been taken by pid 100 on host a"),
        (joining(Some(2), "b", 2), "this job has ranks 0 to 1"),
        (joining(Some(1), "b", 3), "was told that there are 3 ranks, but this job has 2"),
        (Join { version: "0.9".into(), ..joining(Some(1), "b", 2) }, "runs version 0.9"),
        (Join { epoch: Some(Epoch(7)), ..joining(Some(1), "b", 2) }, "epoch 7"),
    ];
    for (join, expected) in cases {
        let request = job.join(seconds(1), join);
        assert!(job.words(request).contains(expected), "{}", job.words(request));
    }
    assert!(!job.answers.contains_key(&first));
    job.join(seconds(2), joining(Some(1), "b", 2));
    assert_eq!(job.answers[&first], Ok(Reply::Rank(Rank(0))));
}

#[test]
fn processes_that_have_joined_join_again_with_their_ranks_and_an_empty_store() {
    let mut job = Job::new(3);
    let join = |rank, host: &str| joining(rank, host, 3);
    for (rank, host) in [(Some(2), "a"), (None, "b"), (None, "a")] {
        job.join(seconds(0), join(rank, host));
    }
    let first = job.core.joined().expect("a roster").clone();
    job.ask(seconds(1), |id| Event::Set(id, Epoch(1), "a key".into(), Bytes::new()));
    let reserved = format!("{}launcher/1", ryzanstein_process_group::store::RESERVED);
    job.ask(seconds(1), |id| Event::Add(id, Epoch(1), reserved.clone(), 7));

    let stranger = job.join(seconds(2), join(Some(0), "c"));
    assert!(job.words(stranger).contains("rank 0 has been taken by"), "{}", job.words(stranger));
    for rank in [2, 0, 1] {
        // Ranks that the rendezvous chose are not known to the processes.
        let Member { host, pid, .. } = first.roster.members[rank].clone();
        let mut again = join((rank == 2).then_some(2), &host);
        again.participant.candidate.pid = pid;
        job.join(seconds(3), again);
    }
    assert_eq!(job.core.joined(), Some(&first));
    assert!(job.core.values.get("a key").is_none());
    assert_eq!(job.core.counter(&reserved), 7);
    assert_eq!(job.core.waiting(), 0);
}

#[test]
fn a_rank_that_joins_again_hears_of_another_that_has_ended() {
    for ends_first in [false, true] {
        let mut job = Job::new(2);
        for rank in [0, 1] {
            job.join(seconds(0), joining(Some(rank), "a", 2));
        }
        let mut again = joining(Some(0), "a", 2);
        again.participant.candidate.pid = job.core.joined().expect("a roster").roster.members[0].pid;
        let ended = Event::ProcessExited(Rank(1), "exited with code 0".into());
        if ends_first {
            job.tell(seconds(1), ended.clone());
        }
        let request = job.join(seconds(2), again);
        if !ends_first {
            job.tell(seconds(3), ended);
        }
        assert_eq!(job.words(request), "rank 1 exited with code 0 without joining again");
    }
}

#[test]
fn at_the_deadline_everyone_who_waits_hears_who_is_missing() {
    let mut job = Job::new(4);
    let a = job.join(seconds(0), joining(Some(0), "a", 4));
    let b = job.join(seconds(5), joining(Some(2), "a", 4));
    assert_eq!(job.core.next_deadline(), Some(seconds(60)));
    job.tell(seconds(60), Event::Tick);
    for request in [a, b] {
        let Err(Refusal::Timeout { missing, .. }) = &job.answers[&request] else { panic!("not a timeout") };
        assert_eq!(missing, &[Rank(1), Rank(3)]);
    }
    let late = job.join(seconds(61), joining(Some(1), "a", 4));
    assert!(job.words(late).contains("too late"));
}

#[test]
fn a_rank_that_lost_its_connection_while_waiting_may_come_again() {
    let mut job = Job::new(2);
    let first = job.join(seconds(0), joining(Some(0), "a", 2));
    job.tell(seconds(1), Event::Disconnected(first));
    let again = job.join(seconds(2), joining(Some(0), "a", 2));
    job.join(seconds(3), joining(Some(1), "a", 2));
    assert_eq!(job.answers[&again], Ok(Reply::Rank(Rank(0))));
    assert!(!job.answers.contains_key(&first));
}

#[test]
fn ranks_that_agree_on_no_backend_are_all_told_why() {
    let mut job = Job::new(2);
    let a = job.join(seconds(0), joining(Some(0), "a", 2));
    let mut other = joining(Some(1), "a", 2);
    other.participant.candidate.wanted = BackendChoice::Nccl;
    let b = job.join(seconds(0), other);
    for request in [a, b] {
        assert!(job.words(request).contains("rank 1 wants `nccl`"), "{}", job.words(request));
        assert!(matches!(&job.answers[&request], Err(Refusal::Configuration(_))), "no other try would help");
    }
}

#[test]
fn a_rank_that_ends_without_joining_is_named_to_those_who_wait_for_it() {
    let mut job = Job::new(2);
    let waiting = job.join(seconds(0), joining(Some(0), "a", 2));
    job.tell(seconds(1), Event::ProcessExited(Rank(0), "ended".into()));
    assert!(!job.answers.contains_key(&waiting));
    job.tell(seconds(1), Event::ProcessExited(Rank(1), "ended with exit code 0".into()));
    assert_eq!(job.words(waiting), "rank 1 ended with exit code 0 without joining");
}

#[test]
fn a_get_waits_for_the_set_and_gives_up_at_its_deadline() {
    let mut job = Job::new(1);
    let get = |key: &str, until| {
        let key = key.to_owned();
        move |request| Event::Get(request, Epoch(1), key, seconds(until))
    };
    let early = job.ask(seconds(0), get("k", 5));
    let patient = [50, 60].map(|until| job.ask(seconds(0), get("k", until)));
    let at_once = job.ask(seconds(1), get("k", 0));
    assert!(matches!(&job.answers[&at_once], Err(Refusal::Timeout { .. })));
    job.tell(seconds(6), Event::Tick);
    assert!(job.words(early).contains("`k`"));
    job.ask(seconds(7), |request| Event::Set(request, Epoch(1), "k".into(), Bytes::from_static(b"v")));
    for request in patient {
        assert_eq!(job.answers[&request], Ok(Reply::Value(Bytes::from_static(b"v"))));
    }
    assert_eq!(job.core.waiting(), 0);
}

#[test]
fn a_counter_counts_and_a_value_that_is_none_is_left_alone() {
    let mut job = Job::new(1);
    let add = |key: &'static str, n| move |request| Event::Add(request, Epoch(1), key.into(), n);
    let a = job.ask(seconds(0), add("n", 5));
    let b = job.ask(seconds(0), add("n", -7));
    assert_eq!((&job.answers[&a], &job.answers[&b]), (&Ok(Reply::Sum(5)), &Ok(Reply::Sum(-2))));
    job.ask(seconds(0), |t| Event::Set(t, Epoch(1), "text".into(), Bytes::from_static(b"abc")));
    let c = job.ask(seconds(0), add("text", 1));
    assert!(job.words(c).contains("does not hold a counter"));
}

#[test]
fn an_empty_value_removes_a_key_of_groups_alone() {
    let mut job = Job::new(1);
    for (key, stays) in [(format!("{}k", ryzanstein_process_group::store::OWN), false), ("k".into(), true)] {
        let set = |value: &'static [u8]| {
            let key = key.clone();
            move |t| Event::Set(t, Epoch(1), key, Bytes::from_static(value))
        };
        job.ask(seconds(0), set(b"v"));
        assert!(job.core.value(&key).is_some());
        job.ask(seconds(0), set(b""));
        assert_eq!(job.core.value(&key).is_some(), stays, "{key}");
    }
}

#[test]
fn the_store_takes_no_more_than_its_share_of_memory() {
    let mut job = Job::new(1);
    let value = Bytes::from(vec![0; MAX_VALUE]);
    let set = |key: String, value: &Bytes| {
        let value = value.clone();
        move |request| Event::Set(request, Epoch(1), key, value)
    };
    let fits = MAX_STORE / (MAX_VALUE + ENTRY_OVERHEAD + 10);
    for i in 0..fits {
        let request = job.ask(seconds(0), set(format!("key{i:07}"), &value));
        assert_eq!(job.answers[&request], Ok(Reply::Done), "{i}");
    }
    let full = job.ask(seconds(0), set("one more".into(), &value));
    assert!(job.words(full).contains("full"));
    // Replacing a value frees the space of the old one.
    let replaced = job.ask(seconds(0), set("key0000000".into(), &Bytes::new()));
    assert_eq!(job.answers[&replaced], Ok(Reply::Done));
    let now = job.ask(seconds(0), set("one more".into(), &value));
    assert_eq!(job.answers[&now], Ok(Reply::Done));

    let long = job.ask(seconds(0), set("k".repeat(MAX_KEY + 1), &Bytes::new()));
    assert!(job.words(long).contains("256 bytes"));
    let large = job.ask(seconds(0), set("k".into(), &Bytes::from(vec![0; MAX_VALUE + 1])));
    assert!(job.words(large).contains("at most"));
}

#[test]
fn the_store_and_its_replies_keep_nothing_of_the_buffer_that_a_value_came_in() {
    let mut job = Job::new(1);
    let waits = job.ask(seconds(0), |request| Event::Get(request, Epoch(1), "k".into(), seconds(9)));
    let buffer = Bytes::from(vec![7; 1 << 10]);
    let value = buffer.slice(..8);
    job.ask(seconds(1), |request| Event::Set(request, Epoch(1), "k".into(), value));
    assert_eq!(job.answers[&waits], Ok(Reply::Value(buffer.slice(..8))));
    assert_eq!(job.core.value("k"), Some(buffer.slice(..8)));
    assert!(buffer.is_unique(), "a part of it is kept");
}

#[test]
fn a_new_epoch_refuses_all_that_is_of_the_old_one() {
    let mut job = Job::new(2);
    let waiting = job.join(seconds(0), joining(Some(0), "a", 2));
    job.ask(seconds(0), |t| Event::Set(t, Epoch(1), "k".into(), Bytes::from_static(b"old")));
    job.tell(seconds(1), Event::NewEpoch(Epoch(2)));
    assert!(job.words(waiting).contains("epoch 2"));
    let stale = job.ask(seconds(2), |t| Event::Set(t, Epoch(1), "k".into(), Bytes::new()));
    assert!(job.words(stale).contains("belongs to epoch 1"));
    let fresh = job.ask(seconds(2), |t| Event::Get(t, Epoch(2), "k".into(), seconds(2)));
    assert!(matches!(&job.answers[&fresh], Err(Refusal::Timeout { .. })), "the store starts empty");
    for rank in 0..2 {
        let join = Join { epoch: Some(Epoch(2)), ..joining(Some(rank), "a", 2) };
        let request = job.join(seconds(3), join);
        if rank == 1 {
            assert_eq!(job.answers[&request], Ok(Reply::Rank(Rank(1))));
        }
    }
}

#[test]
fn a_failure_reaches_everyone_who_waits_and_its_report_is_kept_short() {
    let mut job = Job::new(2);
    let get = job.ask(seconds(0), |t| Event::Get(t, Epoch(1), "k".into(), seconds(60)));
    let report = Report { cause: "é".repeat(MAX_REPORT), ..Report::default() };
    job.ask(seconds(0), |t| Event::Report(t, Epoch(1), Rank(1), report));
    job.ask(seconds(0), |t| Event::Report(t, Epoch(1), Rank(1), Report::default()));
    job.tell(seconds(1), Event::JobFailed("rank 1 was killed".into()));
    assert_eq!(job.words(get), "rank 1 was killed");
    assert!(job.core.reports()[&Rank(1)].cause.len() <= MAX_REPORT, "the first word counts, cut");
    assert!(!job.core.reports()[&Rank(1)].cause.is_empty());
    let later = job.ask(seconds(2), |t| Event::Get(t, Epoch(1), "k".into(), seconds(60)));
    assert_eq!(job.words(later), "rank 1 was killed");
}

#[test]
fn ten_thousand_ranks_join_with_one_answer_each() {
    let mut job = Job::new(10_000);
    for rank in (0..10_000).rev() {
        job.join(seconds(0), joining(Some(rank), &format!("node{}", rank / 8), 10_000));
    }
    assert_eq!(job.answers.len(), 10_000);
    assert_eq!(job.core.joined().map(|j| j.roster.members[9_999].local_rank.0), Some(7));
}

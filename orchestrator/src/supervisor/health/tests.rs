use super::*;

const INTERVAL: Duration = Duration::from_secs(1);

fn s(seconds: f64) -> Duration {
    Duration::from_secs_f64(seconds)
}

fn at(group: &str, begun: u64) -> GroupActivity {
    GroupActivity {
        name: group.into(),
        size: 4,
        begun: Some(begun),
        ended: Some(begun),
        ..GroupActivity::default()
    }
}

/// Returns the state of a rank in collective `call` of a group for this number of seconds.
fn inside(group: &str, call: u64, seconds: f64) -> GroupActivity {
    let current =
        CurrentCall { number: call, operation: "all_reduce".into(), is_message: false, elapsed_s: seconds };
    GroupActivity { ended: Some(call - 1), current: Some(current), ..at(group, call) }
}

/// A job with virtual time: every rank has a process, and sends heartbeats when a test says so.
struct Job {
    watch: Watch,
    ranks: BTreeMap<Rank, Seen>,
    looked: f64,
}

impl Job {
    fn new(ranks: u32) -> Self {
        let seen = Seen { process: Process::Running(Some('S')), beat: None };
        Self {
            watch: Watch::new(INTERVAL),
            ranks: (0..ranks).map(|rank| (Rank(rank), seen.clone())).collect(),
            looked: 0.0,
        }
    }

    fn rank(&mut self, rank: u32) -> &mut Seen {
        self.ranks.get_mut(&Rank(rank)).expect("a rank")
    }

    fn beats(&mut self, now: f64, rank: u32, groups: &[GroupActivity]) {
        let report = Arc::new(Report { groups: groups.to_vec(), ..Report::default() });
        self.rank(rank).beat = Some(Heartbeat { heard: s(now), report });
    }

    /// Examines the ranks every half second until this time, as the supervisor does.
    fn look(&mut self, now: f64) -> Vec<Notice> {
        let mut notices = Vec::new();
        while self.looked + 0.5 < now {
            self.looked += 0.5;
            notices.extend(self.watch.look(s(self.looked), &self.ranks));
        }
        notices.extend(self.look_after_sleep(now));
        notices
    }

    /// Examines the ranks once, after a pause.
    fn look_after_sleep(&mut self, now: f64) -> Vec<Notice> {
        self.looked = now;
        self.watch.look(s(now), &self.ranks)
    }
}

fn missing(notices: &[Notice]) -> (u32, &str, u64, u32) {
    match notices {
        [Notice::Wrong(rank, Trouble::NoProgress(call, _))] => (rank.0, &call.group, call.call, call.waiting),
        other => panic!("expected one rank without progress, not {other:?}"),
    }
}

#[test]
fn a_program_that_never_sent_a_heartbeat_is_never_silent() {
    let mut job = Job::new(2);
    assert_eq!(job.look(0.0), []);
    assert_eq!(job.look(1e4), []);
}

#[test]
fn a_rank_is_silent_after_three_missing_heartbeats_and_told_once() {
    let mut job = Job::new(2);
    job.beats(1.0, 0, &[]);
    job.beats(1.0, 1, &[]);
    assert_eq!(job.look(4.0), []);
    job.beats(4.0, 0, &[]);
    job.rank(1).process = Process::Running(Some('D'));
    assert_eq!(job.look(4.5), [Notice::Wrong(Rank(1), Trouble::Silent(s(3.5), Some('D')))]);
    job.beats(5.0, 0, &[]);
    assert_eq!(job.look(5.0), []);
    assert!(matches!(job.watch.trouble(Rank(1)), Some(Trouble::Silent(age, _)) if *age == s(4.0)));
    job.beats(5.5, 1, &[]);
    assert_eq!(job.look(5.5), [Notice::Speaks(Rank(1))]);
    assert_eq!(job.watch.trouble(Rank(1)), None);
}

#[test]
fn a_launcher_that_was_stopped_itself_gives_ranks_time_to_be_heard_again() {
    let mut job = Job::new(1);
    job.beats(1.0, 0, &[]);
    assert_eq!(job.look(2.0), []);
    assert_eq!(job.look_after_sleep(60.0), []);
    assert_eq!(job.look(62.0), []);
    assert_eq!(job.look(63.5).len(), 1, "it has not been heard since");
}

#[test]
fn dead_stopped_and_leaving_ranks_are_not_silent() {
    let mut job = Job::new(3);
    for rank in 0..3 {
        job.beats(0.0, rank, &[]);
    }
    job.rank(0).process = Process::Ended;
    job.rank(1).process = Process::Stopped;
    let report = Arc::new(Report { leaving: true, ..Report::default() });
    job.rank(2).beat = Some(Heartbeat { heard: s(0.0), report });
    assert_eq!(job.look(100.0), []);
}

#[test]
fn a_silent_rank_that_dies_or_is_stopped_does_not_speak_again() {
    for process in [Process::Ended, Process::Stopped] {
        let mut job = Job::new(1);
        job.beats(0.0, 0, &[]);
        assert_eq!(job.look(10.0).len(), 1);
        job.rank(0).process = process;
        assert_eq!(job.look(11.0), []);
        assert_eq!(job.watch.trouble(Rank(0)), None);
    }
}

#[test]
fn a_rank_that_has_not_begun_what_others_wait_in_makes_no_progress() {
    let mut job = Job::new(4);
    let beats = |job: &mut Job, now: f64, waited: f64| {
        for rank in [0, 1, 3] {
            job.beats(now, rank, &[inside("world", 41, waited)]);
        }
    };
    beats(&mut job, 10.0, 4.9);
    job.beats(10.0, 2, &[at("world", 40)]);
    assert_eq!(job.look(10.0), [], "not yet");
    beats(&mut job, 11.0, 5.9);
    assert_eq!(job.look(11.0), [], "it may have begun the call since it reported");
    job.beats(11.0, 2, &[at("world", 40)]);
    let notices = job.look(11.0);
    assert_eq!(missing(&notices), (2, "world", 41, 3));
    job.beats(12.0, 2, &[at("world", 40)]);
    assert_eq!(job.look(12.0), [], "told once");
    job.beats(13.0, 2, &[at("world", 41)]);
    assert!(matches!(&job.look(13.0)[..], [Notice::Continues(Rank(2), call)] if call.call == 41));
    assert_eq!(job.look(13.5), []);
}

#[test]
fn a_rank_that_is_behind_in_another_call_of_the_same_group_is_told_again() {
    let mut job = Job::new(2);
    job.beats(10.0, 0, &[inside("world", 41, 6.0)]);
    job.beats(10.0, 1, &[at("world", 40)]);
    assert_eq!(missing(&job.look(10.0)).2, 41);
    job.beats(20.0, 0, &[inside("world", 42, 6.0)]);
    job.beats(20.0, 1, &[at("world", 41)]);
    assert_eq!(missing(&job.look(20.0)).2, 42);
}

#[test]
fn who_waits_for_a_rank_is_not_blamed_for_those_that_wait_for_it() {
    let mut job = Job::new(4);
    // 3 computes for ever; 2 waits for it in their pair; 0 and 1 wait for 2 and 3 in the world.
    for rank in [0, 1] {
        job.beats(10.0, rank, &[inside("world", 41, 8.0)]);
    }
    job.beats(10.0, 2, &[at("world", 40), inside("pair", 7, 9.0)]);
    job.beats(10.0, 3, &[at("world", 40), at("pair", 6)]);
    assert_eq!(missing(&job.look(10.0)), (3, "pair", 7, 1));
}

#[test]
fn ranks_that_wait_for_each_other_are_both_named_with_their_own_calls() {
    let mut job = Job::new(2);
    job.beats(10.0, 0, &[inside("a", 1, 8.0), at("b", 0)]);
    job.beats(10.0, 1, &[at("a", 0), inside("b", 1, 8.0)]);
    let notices = job.look(10.0);
    let own: Vec<_> = notices
        .iter()
        .map(|notice| match notice {
            Notice::Wrong(rank, Trouble::NoProgress(_, Some((group, call)))) => {
                (rank.0, &**group, call.number)
            }
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(own, [(0, "a", 1), (1, "b", 1)]);
}

#[test]
fn a_stopped_or_silent_rank_explains_who_waits_for_it() {
    let mut job = Job::new(3);
    job.beats(10.0, 0, &[inside("world", 41, 8.0)]);
    job.beats(10.0, 1, &[at("world", 40), inside("pair", 7, 9.0)]);
    job.beats(2.0, 2, &[at("world", 40), at("pair", 6)]);
    job.rank(2).process = Process::Stopped;
    assert_eq!(job.look(10.0), []);
    job.rank(2).process = Process::Running(None);
    assert_eq!(job.look(10.0), [Notice::Wrong(Rank(2), Trouble::Silent(s(8.0), None))]);
}

#[test]
fn messages_failed_groups_and_unrecorded_calls_blame_nobody() {
    let mut job = Job::new(2);
    let mut message = inside("world", 41, 60.0);
    message.current.as_mut().expect("a call").is_message = true;
    let failed = GroupActivity { failed: true, ..inside("world", 41, 60.0) };
    for group in [message, failed] {
        job.beats(100.0, 0, &[group]);
        job.beats(100.0, 1, &[at("world", 40)]);
        assert_eq!(job.look(100.0), []);
    }
    job.beats(100.0, 0, &[inside("world", 41, 60.0)]);
    job.beats(100.0, 1, &[GroupActivity { begun: None, ..at("world", 0) }]);
    assert_eq!(job.look(100.0), [], "its recorder does not go back to its last collective");
    job.beats(100.0, 1, &[at("elsewhere", 3)]);
    assert_eq!(job.look(100.0), [], "it is not in that group");
}

#[test]
fn waiting_that_ends_without_the_rank_is_no_progress_of_it() {
    let mut job = Job::new(2);
    job.beats(10.0, 0, &[inside("world", 41, 8.0)]);
    job.beats(10.0, 1, &[at("world", 40)]);
    assert_eq!(job.look(10.0).len(), 1);
    job.beats(11.0, 0, &[GroupActivity { failed: true, ..at("world", 41) }]);
    assert_eq!(job.look(11.0), [], "it has not continued");
    assert_eq!(job.watch.trouble(Rank(1)), None);
}

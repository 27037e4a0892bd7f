use super::*;

fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

fn job(ranks: u32, max_restarts: u32) -> Core {
    let policy = Policy { grace: ms(5000), exit_window: ms(500), max_restarts };
    Core::new((0..ranks).map(Rank).collect(), policy)
}

fn ends(rank: u32, exit: Exit) -> Event {
    Event::Exited { rank: Rank(rank), exit, secondary: false }
}

fn ends_secondary(rank: u32) -> Event {
    Event::Exited { rank: Rank(rank), exit: Exit::Code(1), secondary: true }
}

fn outcome(actions: &[Action]) -> &Outcome {
    match actions.last() {
        Some(Action::Finish(outcome)) => outcome,
        other => panic!("not over: {other:?}"),
    }
}

#[test]
fn a_job_whose_ranks_all_end_well_ends_well() {
    let mut core = job(2, 0);
    assert_eq!(core.start(), Action::Start(Epoch(1)));
    assert_eq!(core.handle(ms(1), ends(1, Exit::Code(0))), []);
    let actions = core.handle(ms(9), ends(0, Exit::Code(0)));
    assert_eq!(outcome(&actions).exit_code, 0);
    assert_eq!(outcome(&actions).first_failure, None);
}

#[test]
fn the_others_may_exit_by_themselves_then_get_sigterm_then_sigkill() {
    let mut core = job(3, 0);
    assert_eq!(core.handle(ms(100), ends(1, Exit::Code(7))), [Action::Announce(Rank(1))]);
    assert_eq!(core.next_deadline(), Some(ms(600)));
    assert_eq!(core.handle(ms(600), Event::Tick), [Action::Signal(signal::TERMINATE)]);
    assert_eq!(core.handle(ms(700), ends(0, Exit::Signal(signal::TERMINATE))), []);
    assert_eq!(core.handle(ms(5600), Event::Tick), [Action::Kill]);
    let actions = core.handle(ms(5601), ends(2, Exit::Signal(signal::KILL)));
    assert_eq!(outcome(&actions).first_failure, Some((Rank(1), Exit::Code(7))));
    assert_eq!(outcome(&actions).exit_code, 7);
}

#[test]
fn the_first_failure_is_a_root_cause_then_the_one_seen_first() {
    // (events in the order seen, with their times) → the culprit
    let cases: [(&[(u64, Event)], u32); 5] = [
        // The plain case: the one seen first.
        (&[(1, ends(2, Exit::Code(3))), (2, ends(0, Exit::Code(4))), (3, ends(1, Exit::Code(5)))], 2),
        // A secondary failure seen before its cause.
        (&[(1, ends_secondary(0)), (2, ends(2, Exit::Signal(11))), (3, ends_secondary(1))], 2),
        // Seen at one time: the one killed.
        (&[(1, ends(0, Exit::Code(1))), (1, ends(1, Exit::Signal(9))), (1, ends(2, Exit::Code(1)))], 1),
        // Killed later, as libraries abort when a peer goes: not the cause.
        (&[(1, ends(0, Exit::Code(7))), (2, ends(1, Exit::Signal(6))), (2, ends(2, Exit::Code(1)))], 0),
        // All are secondary: the one seen first.
        (&[(1, ends_secondary(1)), (2, ends_secondary(0)), (3, ends_secondary(2))], 1),
    ];
    for (events, culprit) in cases {
        let mut core = job(3, 0);
        let mut last = Vec::new();
        for (time, event) in events {
            last = core.handle(ms(*time), *event);
        }
        assert_eq!(outcome(&last).first_failure.map(|(rank, _)| rank), Some(Rank(culprit)), "{events:?}");
    }
}

#[test]
fn a_killed_rank_gives_128_and_its_signal() {
    let actions = job(1, 0).handle(ms(1), ends(0, Exit::Signal(9)));
    assert_eq!(outcome(&actions).exit_code, 137);
}

#[test]
fn ctrl_c_is_passed_on_and_the_second_kills() {
    let mut core = job(2, 3);
    assert_eq!(
        core.handle(ms(0), Event::Interrupted(signal::INTERRUPT)),
        [Action::Signal(signal::INTERRUPT)]
    );
    assert_eq!(core.handle(ms(10), ends(0, Exit::Code(1))), []);
    assert_eq!(core.handle(ms(20), Event::Interrupted(signal::INTERRUPT)), [Action::Kill]);
    let actions = core.handle(ms(30), ends(1, Exit::Signal(9)));
    let outcome = outcome(&actions);
    assert_eq!((outcome.exit_code, outcome.first_failure, outcome.interrupted), (130, None, Some(2)));
}

#[test]
fn ranks_that_ignore_ctrl_c_are_killed_after_the_grace() {
    let mut core = job(1, 0);
    core.handle(ms(0), Event::Interrupted(signal::INTERRUPT));
    assert_eq!(core.next_deadline(), Some(ms(5000)));
    assert_eq!(core.handle(ms(5000), Event::Tick), [Action::Kill]);
}

#[test]
fn a_job_whose_launcher_died_is_killed_at_once() {
    let mut core = job(2, 5);
    assert_eq!(core.handle(ms(0), Event::LifelineClosed), [Action::Kill]);
    core.handle(ms(1), ends(0, Exit::Signal(9)));
    let actions = core.handle(ms(1), ends(1, Exit::Signal(9)));
    assert_eq!(outcome(&actions).epoch, Epoch(1), "and not started again");
}

#[test]
fn restarts_are_bounded_and_each_has_its_epoch() {
    let mut core = job(1, 2);
    assert_eq!(core.handle(ms(1), ends(0, Exit::Code(1))).last(), Some(&Action::Start(Epoch(2))));
    assert_eq!(core.handle(ms(2), ends(0, Exit::Signal(9))).last(), Some(&Action::Start(Epoch(3))));
    let actions = core.handle(ms(3), ends(0, Exit::Code(4)));
    assert_eq!((outcome(&actions).epoch, outcome(&actions).exit_code), (Epoch(3), 4));
}

#[test]
fn a_restarted_job_that_ends_well_is_a_success() {
    let mut core = job(1, 1);
    core.handle(ms(1), ends(0, Exit::Code(1)));
    assert_eq!(outcome(&core.handle(ms(2), ends(0, Exit::Code(0)))).exit_code, 0);
}

#[test]
fn wrong_usage_is_not_restarted() {
    let actions = job(1, 5).handle(ms(1), ends(0, Exit::Code(DO_NOT_RESTART)));
    assert_eq!(outcome(&actions).exit_code, DO_NOT_RESTART);
}

#[test]
fn a_rank_that_exits_on_a_signal_from_the_supervisor_is_never_the_first_failure() {
    let mut core = job(2, 0);
    core.handle(ms(0), ends(0, Exit::Code(9)));
    core.handle(ms(500), Event::Tick);
    let actions =
        core.handle(ms(501), Event::Exited { rank: Rank(1), exit: Exit::Signal(15), secondary: false });
    assert_eq!(outcome(&actions).first_failure, Some((Rank(0), Exit::Code(9))));
}

#[test]
fn a_process_that_cannot_be_killed_is_not_waited_for() {
    let mut core = job(1, 0);
    core.handle(ms(0), Event::LifelineClosed);
    assert_eq!(
        core.handle(ms(50), Event::Tick),
        [Action::Kill],
        "once more, for processes that were just forked"
    );
    let actions = core.handle(ms(5000), Event::Tick);
    assert_eq!(outcome(&actions).exit_code, 137);
}

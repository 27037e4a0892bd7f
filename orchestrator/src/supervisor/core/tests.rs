use super::*;

fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

fn job(ranks: u32, max_restarts: u32) -> Core {
    let policy = Policy { grace: ms(5000), exit_window: ms(500), max_restarts, is_whole: true };
    Core::new((0..ranks).map(Rank).collect(), policy)
}

fn ends(rank: u32, exit: Exit) -> Event {
    Event::Exited { rank: Rank(rank), exit, origin: Origin::Itself }
}

/// Returns an exit with code 1 that blames another rank.
fn blames(rank: u32, blamed: u32) -> Event {
    Event::Exited { rank: Rank(rank), exit: Exit::Code(1), origin: Origin::Rank(Rank(blamed)) }
}

/// Returns an exit with code 1 of a rank that waited in vain for others.
fn waited(rank: u32) -> Event {
    Event::Exited { rank: Rank(rank), exit: Exit::Code(1), origin: Origin::Another }
}

fn outcome(actions: &[Action]) -> &Outcome {
    match actions.last() {
        Some(Action::Finish(outcome)) => outcome,
        other => panic!("not over: {other:?}"),
    }
}

/// Returns the first failure, and its exit if the rank exited.
fn culprit(actions: &[Action]) -> Option<(Rank, Option<Exit>)> {
    outcome(actions).first_failure.map(|failure| (failure.rank, failure.exit))
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
    assert_eq!(culprit(&actions), Some((Rank(1), Some(Exit::Code(7)))));
    assert_eq!(outcome(&actions).exit_code, 7);
}

#[test]
fn the_first_failure_is_a_root_cause_then_the_one_seen_first() {
    // (events in the order seen, with their times) → the culprit
    let cases: [(&[(u64, Event)], u32); 9] = [
        // The plain case: the one seen first.
        (&[(1, ends(2, Exit::Code(3))), (2, ends(0, Exit::Code(4))), (3, ends(1, Exit::Code(5)))], 2),
        // A secondary failure seen before its cause.
        (&[(1, blames(0, 2)), (2, ends(2, Exit::Signal(11))), (3, blames(1, 2))], 2),
        // Seen at one time: the one killed.
        (&[(1, ends(0, Exit::Code(1))), (1, ends(1, Exit::Signal(9))), (1, ends(2, Exit::Code(1)))], 1),
        // Killed later, as libraries abort when a peer disappears: not the cause.
        (&[(1, ends(0, Exit::Code(7))), (2, ends(1, Exit::Signal(6))), (2, ends(2, Exit::Code(1)))], 0),
        // All blame each other, or a rank of another node: the one seen first.
        (&[(1, blames(1, 0)), (2, blames(0, 2)), (3, blames(2, 1))], 1),
        (&[(1, blames(1, 1)), (2, blames(0, 1)), (3, blames(2, 1))], 1),
        (&[(1, blames(1, 9)), (2, blames(0, 9)), (3, blames(2, 1))], 1),
        // The blamed rank left early, with success; so did another one.
        (&[(1, ends(1, Exit::Code(0))), (2, ends(0, Exit::Code(0))), (3, blames(2, 0))], 0),
        // The blamed rank left early, with success.
        (&[(1, ends(0, Exit::Code(0))), (2, blames(1, 0)), (3, blames(2, 0))], 0),
    ];
    for (events, culprit) in cases {
        let mut core = job(3, 0);
        let mut last = Vec::new();
        for (time, event) in events {
            last = core.handle(ms(*time), *event);
        }
        assert_eq!(
            outcome(&last).first_failure.map(|failure| failure.rank),
            Some(Rank(culprit)),
            "{events:?}"
        );
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
    assert_eq!(core.handle(ms(120), Event::Interrupted(signal::INTERRUPT)), [Action::Kill]);
    let actions = core.handle(ms(130), ends(1, Exit::Signal(9)));
    let outcome = outcome(&actions);
    assert_eq!((outcome.exit_code, outcome.first_failure, outcome.interrupted), (130, None, Some(2)));
}

#[test]
fn neither_two_signals_at_once_nor_a_second_request_to_end_take_the_grace_away() {
    const HANGUP: i32 = 1;
    let cases = [(signal::TERMINATE, 0), (signal::TERMINATE, 4000), (HANGUP, 4000), (signal::INTERRUPT, 0)];
    for (signal, later) in cases {
        let mut core = job(2, 3);
        assert_eq!(core.handle(ms(0), Event::Interrupted(signal)), [Action::Signal(signal)]);
        let told = (later > 0).then(|| Action::TellAskedBefore(signal, ms(5000 - later)));
        let actions = core.handle(ms(later), Event::Interrupted(signal));
        assert_eq!(actions, Vec::from_iter(told), "{signal} after {later} ms");
        assert_eq!(core.next_deadline(), Some(ms(5000)));
    }
    let mut core = job(2, 3);
    core.handle(ms(0), Event::Interrupted(signal::TERMINATE));
    assert_eq!(core.handle(ms(4000), Event::Interrupted(signal::INTERRUPT)), [Action::Kill], "Ctrl-C does");
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
fn a_rank_that_did_not_exit_is_the_first_failure_if_the_others_gave_up_because_of_it() {
    // Rank 0 blames rank 2, which blames rank 1, which is stopped.
    let mut core = job(3, 0);
    let signal = 19;
    assert_eq!(
        core.handle(ms(1), Event::Stopped(Rank(1), signal)),
        [Action::TellStopped(Rank(1), signal)],
        "and nothing is killed"
    );
    assert_eq!(core.next_deadline(), None);
    core.handle(ms(10), blames(0, 2));
    core.handle(ms(11), blames(2, 1));
    assert_eq!(core.handle(ms(510), Event::Tick), [Action::Signal(signal::TERMINATE)]);
    let actions = core.handle(ms(511), ends(1, Exit::Signal(9)));
    let wanted = FirstFailure { rank: Rank(1), exit: None, stopped: Some(signal), gave_up: Rank(0), code: 1 };
    assert_eq!(outcome(&actions).first_failure, Some(wanted));
    assert_eq!(outcome(&actions).exit_code, 1, "the code of the first that gave up");
}

#[test]
fn a_rank_that_cannot_be_killed_is_blamed_too() {
    let mut core = job(2, 0);
    core.handle(ms(0), blames(0, 1));
    core.handle(ms(500), Event::Tick);
    core.handle(ms(5500), Event::Tick);
    let actions = core.handle(ms(10_500), Event::Tick);
    assert_eq!(culprit(&actions), Some((Rank(1), None)));
}

#[test]
fn a_stop_and_the_end_of_it_are_told_once_each() {
    let mut core = job(2, 0);
    assert_eq!(core.handle(ms(1), Event::Stopped(Rank(0), 19)), [Action::TellStopped(Rank(0), 19)]);
    assert_eq!(core.handle(ms(2), Event::Stopped(Rank(0), 19)), []);
    assert_eq!(core.handle(ms(3), Event::Continued(Rank(0))), [Action::TellContinued(Rank(0))]);
    assert_eq!(core.handle(ms(4), Event::Continued(Rank(0))), []);
    assert_eq!(core.handle(ms(5), ends(0, Exit::Code(0))), []);
    assert_eq!(outcome(&core.handle(ms(6), ends(1, Exit::Code(0)))).exit_code, 0);
}

#[test]
fn while_the_job_is_suspended_stops_do_not_count_and_continuations_do() {
    let mut core = job(2, 0);
    core.handle(ms(1), Event::Stopped(Rank(0), 19));
    core.suspend(true);
    assert_eq!(core.handle(ms(2), Event::Stopped(Rank(1), 19)), []);
    assert_eq!(core.handle(ms(3), Event::Continued(Rank(0))), [Action::TellContinued(Rank(0))]);
    assert_eq!(core.handle(ms(4), Event::Stopped(Rank(0), 19)), []);
    core.suspend(false);
    assert!(!core.is_stopped(Rank(0)) && !core.is_stopped(Rank(1)));
    assert_eq!(core.handle(ms(5), Event::Stopped(Rank(1), 19)), [Action::TellStopped(Rank(1), 19)]);
}

/// Returns the number of the restart, and the wait before it.
fn restart(actions: &[Action]) -> (u32, Duration) {
    match actions.last() {
        Some(Action::Restart { number, wait, .. }) => (*number, *wait),
        other => panic!("not restarted: {other:?}"),
    }
}

#[test]
fn restarts_are_bounded_and_each_has_its_epoch_and_a_longer_wait() {
    let mut core = job(1, 7);
    let mut now = ms(0);
    for (number, seconds) in [(1, 1), (2, 2), (3, 4), (4, 8), (5, 16), (6, 30), (7, 30)] {
        let wait = ms(1000 * seconds);
        assert_eq!(restart(&core.handle(now, ends(0, Exit::Code(1)))), (number, wait));
        assert_eq!(core.next_deadline(), Some(now + wait));
        assert_eq!(core.handle(now + ms(1000 * seconds - 1), Event::Tick), []);
        now += wait;
        assert_eq!(core.handle(now, Event::Tick), [Action::Start(Epoch(u64::from(number) + 1))]);
    }
    let actions = core.handle(now, ends(0, Exit::Code(4)));
    assert_eq!((outcome(&actions).epoch, outcome(&actions).exit_code), (Epoch(8), 4));
}

#[test]
fn an_epoch_that_ran_for_long_makes_the_restarts_before_it_count_no_more() {
    let mut core = job(1, 1);
    assert_eq!(restart(&core.handle(ms(0), ends(0, Exit::Code(1)))).0, 1);
    core.handle(ms(1000), Event::Tick);
    // Five minutes from the start of the epoch, which was after the wait.
    assert_eq!(restart(&core.handle(ms(301_000), ends(0, Exit::Code(1)))), (1, ms(1000)));
    core.handle(ms(302_000), Event::Tick);
    let actions = core.handle(ms(601_999), ends(0, Exit::Code(1)));
    assert_eq!(outcome(&actions).epoch, Epoch(3));
}

#[test]
fn a_job_that_waits_for_a_restart_can_be_interrupted() {
    for (event, code) in [(Event::Interrupted(signal::TERMINATE), 143), (Event::LifelineClosed, 137)] {
        let mut core = job(1, 1);
        core.handle(ms(0), ends(0, Exit::Code(1)));
        let actions = core.handle(ms(10), event);
        assert_eq!((outcome(&actions).exit_code, outcome(&actions).epoch), (code, Epoch(1)));
        assert_eq!(core.handle(ms(1000), Event::Tick), [], "it is over");
    }
}

#[test]
fn a_job_that_is_interrupted_while_it_is_killed_is_not_restarted() {
    let mut core = job(2, 1);
    core.handle(ms(0), ends(0, Exit::Code(1)));
    core.handle(ms(500), Event::Tick);
    assert_eq!(core.handle(ms(5500), Event::Tick), [Action::Kill]);
    assert_eq!(core.handle(ms(5510), Event::Interrupted(signal::INTERRUPT)), []);
    let actions = core.handle(ms(5520), ends(1, Exit::Signal(signal::KILL)));
    assert_eq!(outcome(&actions).exit_code, 130);
}

#[test]
fn a_restarted_job_that_ends_well_is_a_success() {
    let mut core = job(1, 1);
    core.handle(ms(1), ends(0, Exit::Code(1)));
    core.handle(ms(1001), Event::Tick);
    assert_eq!(outcome(&core.handle(ms(1002), ends(0, Exit::Code(0)))).exit_code, 0);
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
    let actions = core.handle(ms(501), ends(1, Exit::Signal(15)));
    assert_eq!(culprit(&actions), Some((Rank(0), Some(Exit::Code(9)))));
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

#[test]
fn of_ranks_that_waited_in_vain_the_one_that_they_waited_for_is_the_first_failure() {
    // Ranks 0 and 1 give up; rank 2 does something else.
    let cases: [(&[Event], Event, Option<Exit>); 3] = [
        // It is stopped.
        (&[Event::Stopped(Rank(2), 19)], ends(2, Exit::Signal(9)), None),
        // It is stuck.
        (&[], ends(2, Exit::Signal(15)), None),
        // It has left with success.
        (&[ends(2, Exit::Code(0))], Event::Tick, Some(Exit::Code(0))),
    ];
    for (before, after, exit) in cases {
        let mut core = job(3, 0);
        for event in before {
            core.handle(ms(0), *event);
        }
        core.handle(ms(10), waited(1));
        let mut actions = core.handle(ms(11), waited(0));
        if actions.is_empty() {
            core.handle(ms(510), Event::Tick);
            actions = core.handle(ms(511), after);
        }
        let first = outcome(&actions).first_failure.expect("a failure");
        assert_eq!((first.rank, first.exit, first.gave_up), (Rank(2), exit, Rank(1)), "{before:?}");
        assert_eq!(outcome(&actions).exit_code, 1);
    }
}

#[test]
fn a_rank_that_waited_in_vain_is_the_first_failure_if_nothing_is_known_of_the_others() {
    // Two others have not failed: either may be the reason.
    let mut core = job(3, 0);
    core.handle(ms(0), waited(1));
    core.handle(ms(500), Event::Tick);
    core.handle(ms(501), ends(0, Exit::Signal(15)));
    let actions = core.handle(ms(502), ends(2, Exit::Signal(15)));
    assert_eq!(culprit(&actions), Some((Rank(1), Some(Exit::Code(1)))));
    // But one of them told that it waited too, and got the signal before it exited.
    let mut core = job(3, 0);
    core.handle(ms(0), waited(1));
    core.handle(ms(500), Event::Tick);
    let told = Event::Exited { rank: Rank(0), exit: Exit::Signal(15), origin: Origin::Another };
    core.handle(ms(501), told);
    let actions = core.handle(ms(502), ends(2, Exit::Signal(15)));
    assert_eq!(culprit(&actions), Some((Rank(2), None)));
    // A failure of its own explains more than a stop that may be by chance.
    let mut core = job(2, 0);
    core.handle(ms(0), Event::Stopped(Rank(0), 19));
    core.handle(ms(1), ends(1, Exit::Code(3)));
    core.handle(ms(501), Event::Tick);
    let actions = core.handle(ms(502), ends(0, Exit::Signal(9)));
    assert_eq!(culprit(&actions), Some((Rank(1), Some(Exit::Code(3)))));
}

#[test]
fn with_other_nodes_no_rank_is_named_that_is_only_left_over() {
    for origin in [Origin::Another, Origin::Rank(Rank(9))] {
        let policy = Policy { grace: ms(5000), exit_window: ms(500), max_restarts: 0, is_whole: false };
        let mut core = Core::new(vec![Rank(0), Rank(1), Rank(2)], policy);
        core.handle(ms(0), Event::OthersLeft);
        core.handle(ms(0), ends(0, Exit::Code(0)));
        core.handle(ms(1), Event::Exited { rank: Rank(1), exit: Exit::Code(1), origin });
        core.handle(ms(501), Event::Tick);
        let actions = core.handle(ms(502), ends(2, Exit::Signal(15)));
        assert_eq!(culprit(&actions), Some((Rank(1), Some(Exit::Code(1)))), "{origin:?}");
    }
}

#[test]
fn a_node_waits_for_the_others_without_a_deadline_unless_the_job_has_failed() {
    use Event::{CutOff, Interrupted, LifelineClosed, OthersLeft, Tick};
    let (well, failed) = (ends(0, Exit::Code(0)), ends(0, Exit::Code(7)));
    // (events, exit code), of which the last one ends the job, and the one before did not
    let cases: [(&[(u64, Event)], i32); 11] = [
        (&[(1, well), (900_000, OthersLeft)], 0),
        (&[(1, OthersLeft), (2, well)], 0),
        (&[(1, well), (900_000, CutOff), (903_000, Tick)], 1),
        (&[(1, well), (900_000, CutOff), (900_001, OthersLeft)], 1),
        (&[(1, well), (900_000, Interrupted(signal::TERMINATE))], 143),
        (&[(1, well), (2, LifelineClosed)], 137),
        (&[(1, failed), (2, LifelineClosed)], 7),
        (&[(1, failed), (3001, Tick)], 7),
        (&[(1, failed), (2, OthersLeft)], 7),
        (&[(1, failed), (2, Interrupted(signal::TERMINATE))], 7),
        // The rank fails as well, because of what cut the node off.
        (&[(1, CutOff), (2, failed), (3, OthersLeft)], 1),
    ];
    for (events, code) in cases {
        let policy = Policy { grace: ms(5000), exit_window: ms(500), max_restarts: 0, is_whole: false };
        let mut core = Core::new(vec![Rank(0)], policy);
        let mut last = Vec::new();
        for (time, event) in events {
            assert!(!matches!(last.last(), Some(Action::Finish(_))), "{events:?}");
            last = core.handle(ms(*time), *event);
        }
        assert_eq!(outcome(&last).exit_code, code, "{events:?}");
    }
}

#[test]
fn the_ranks_of_a_node_that_is_cut_off_may_exit_by_themselves_then_get_sigterm() {
    let mut core = job(2, 0);
    assert_eq!(core.handle(ms(100), Event::CutOff), []);
    assert_eq!(core.handle(ms(200), ends(0, Exit::Code(1))), []);
    assert_eq!(core.handle(ms(600), Event::Tick), [Action::Signal(signal::TERMINATE)]);
    let actions = core.handle(ms(700), ends(1, Exit::Signal(signal::TERMINATE)));
    assert_eq!((outcome(&actions).first_failure, outcome(&actions).exit_code), (None, 1));
}

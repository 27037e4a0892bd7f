//! Every rule of decisions 0014, 0016 and 0017 on a network of cores in virtual time, and thousands of seeded runs.

use std::time::{Duration, Instant};

use rand::Rng;

use super::network::{LOOK, Network, all_reduce, rank, recv, send};
use super::*;
use crate::types::history::REMEMBERED;
use crate::types::operation::{Operation, ReduceOp};

/// More than the maximum time of a message in transit.
const DELAY: Duration = Duration::from_millis(3);
const SECOND: Duration = Duration::from_secs(1);

fn ms(milliseconds: u64) -> Duration {
    Duration::from_millis(milliseconds)
}

fn failure(net: &Network, member: usize) -> &Error {
    let failure = net.nodes[member].failure.as_ref();
    &failure.unwrap_or_else(|| panic!("seed {}: member {member} has not failed", net.seed)).1
}

fn failed_after(net: &Network, member: usize, since: Instant) -> Duration {
    failure(net, member);
    net.nodes[member].failure.as_ref().map_or(Duration::MAX, |(at, _)| at.saturating_duration_since(since))
}

fn nobody_fails(net: &Network) {
    for (member, node) in net.nodes.iter().enumerate() {
        assert!(node.failure.is_none(), "seed {}: member {member} fails: {:?}", net.seed, node.failure);
    }
}

/// Returns true if an error names this member as lost, itself or through another member that gave up because of it.
fn names_lost(error: &Error, member: usize) -> bool {
    match error {
        Error::PeerLost { rank: named, .. } => *named == rank(member),
        Error::PeerAborted { reason, .. } => reason.contains(&format!("lost rank {}", rank(member))),
        _ => false,
    }
}

/// Returns the same for a member whose process does not respond.
fn names_unresponsive(error: &Error, member: usize) -> bool {
    match error {
        Error::PeerUnresponsive { rank: named, pid, .. } => {
            *named == rank(member) && *pid == 1000 + member as u32
        }
        Error::PeerAborted { reason, .. } => {
            reason.contains(&format!("rank {} is unresponsive", rank(member)))
        }
        _ => false,
    }
}

// ---- 0014: the library is watched from outside ------------------------------------------------------------------------

#[test]
fn a_member_that_dies_is_named_at_once_by_all_others() {
    let mut net = Network::new(4, 1);
    net.all_call(all_reduce(8));
    net.run_for(ms(50));
    for member in 0..3 {
        net.call(member, all_reduce(9));
    }
    let died = net.now;
    net.kill(3);
    net.run_for(LOOK);
    for member in 0..3 {
        assert!(names_lost(failure(&net, member), 3), "{}", failure(&net, member));
        assert!(failed_after(&net, member, died) <= DELAY, "by the link, not by a look");
    }
    let Error::PeerLost { host, pid, during, .. } = failure(&net, 0) else {
        // Another member's message came first.
        return;
    };
    assert_eq!((host.as_str(), *pid, during.as_str()), ("host-3", 1003, "all_reduce(sum) of 9 f32"));
}

#[test]
fn a_member_that_gives_up_says_why_to_all_others() {
    let mut net = Network::new(3, 2);
    net.report(1, CallerEvent::Abort(Error::Transport("out of memory".into())));
    net.run_for(LOOK);
    for member in [0, 2] {
        let Error::PeerAborted { rank: named, reason } = failure(&net, member) else {
            panic!("{}", failure(&net, member));
        };
        assert!(*named == rank(1) && reason.contains("out of memory"), "{reason}");
    }
}

#[test]
fn a_member_that_never_calls_is_named_at_the_deadline_by_all() {
    let mut net = Network::new(3, 3);
    for member in [0, 2] {
        net.call(member, all_reduce(8));
    }
    let (called, timeout) = (net.now, net.timeout);
    net.run_for(timeout.saturating_sub(ms(1)));
    nobody_fails(&net);
    net.run_for(SECOND);
    for member in 0..3 {
        assert!(
            failure(&net, member).to_string().ends_with("rank 11 is not there"),
            "{}",
            failure(&net, member)
        );
        assert!(
            failed_after(&net, member, called) < timeout + LOOK + 3 * DELAY,
            "it waits for no answer that has come"
        );
    }
}

#[test]
fn members_that_do_not_answer_at_a_deadline_are_missing_and_waited_for_half_a_second() {
    let mut net = Network::new(3, 4);
    for member in [0, 2] {
        net.call(member, all_reduce(8));
    }
    net.stop(1);
    let (called, timeout) = (net.now, net.timeout);
    net.run_for(timeout + SECOND);
    for member in [0, 2] {
        assert!(
            failure(&net, member).to_string().ends_with("rank 11 is not there"),
            "{}",
            failure(&net, member)
        );
        let after = failed_after(&net, member, called);
        assert!((timeout + ANSWERS..timeout + ANSWERS + 2 * LOOK + DELAY).contains(&after), "{after:?}");
    }
}

#[test]
fn a_member_that_gives_up_without_having_called_is_missing_at_a_deadline() {
    let mut net = Network::new(3, 5);
    for member in [0, 1] {
        net.call(member, all_reduce(8));
    }
    // It gives up before it learns that the others ask.
    net.stop(2);
    net.run_for(net.timeout + LOOK);
    net.report(2, CallerEvent::Abort(Error::Transport("out of memory".into())));
    net.run_for(ANSWERS);
    for member in [0, 1] {
        let said = failure(&net, member).to_string();
        assert!(said.ends_with("rank 12 is not there"), "{said}");
    }
}

#[test]
fn a_member_whose_process_is_stopped_is_unresponsive_and_one_that_computes_is_not() {
    for continues in [true, false] {
        let mut net = Network::new(4, 6);
        net.timeout = 10 * SECOND;
        for member in [0, 2] {
            net.call(member, all_reduce(8));
        }
        // One member is stopped, the other computes.
        net.stop(1);
        let stopped = net.now;
        net.run_for(5 * SECOND);
        for member in [0, 2] {
            let [(at, 1, true)] = net.nodes[member].told[..] else { panic!("{:?}", net.nodes[member].told) };
            assert!(at.saturating_duration_since(stopped) < 5 * SECOND);
        }
        nobody_fails(&net);
        if continues {
            net.resume(1);
            for member in [1, 3] {
                net.call(member, all_reduce(8));
            }
            net.run_for(20 * SECOND);
            nobody_fails(&net);
            assert!(matches!(net.nodes[0].told[..], [_, (_, 1, false)]), "{:?}", net.nodes[0].told);
        } else {
            net.run_for(6 * SECOND);
            for member in [0, 2] {
                assert!(names_unresponsive(failure(&net, member), 1), "{}", failure(&net, member));
            }
        }
    }
}

#[test]
fn a_member_that_has_left_in_good_order_is_not_unresponsive() {
    let mut net = Network::new(3, 7);
    net.timeout = 10 * SECOND;
    net.leave(2);
    net.run_for(SECOND);
    net.call(0, send(1, 8));
    net.run_for(8 * SECOND);
    assert_eq!(net.nodes[0].told, []);
}

#[test]
fn a_call_that_all_have_made_and_that_does_not_end_blames_nobody() {
    let mut net = Network::new(2, 5);
    net.hangs_from = Some(1);
    net.all_call(all_reduce(8));
    net.run_for(net.timeout + SECOND);
    for member in 0..2 {
        let said = failure(&net, member).to_string();
        assert!(said.ends_with("every rank is there, but not finished"), "{said}");
    }
}

#[test]
fn a_caller_blocked_in_a_copy_blames_those_with_the_fewest_calls() {
    let mut net = Network::new(4, 12);
    net.all_call(all_reduce(8));
    net.run_for(ms(50));
    // One member is stuck; another waits for it in an earlier call than the two that are blocked in copies.
    net.hold_up(0);
    net.hold_up(1);
    for (member, calls) in [(0, 3), (1, 3), (2, 2), (3, 1)] {
        for _ in 0..calls {
            net.call(member, all_reduce(8));
            net.mark(member);
            net.run_for(ms(5));
        }
    }
    net.run_for(net.timeout + SECOND);
    for member in 0..4 {
        let said = failure(&net, member).to_string();
        assert!(said.ends_with("rank 13 is not there"), "{said}");
    }
}

#[test]
fn a_wait_that_expires_for_a_message_names_its_peer_without_asking() {
    let mut net = Network::new(3, 6);
    net.call(0, recv(2, 8));
    let event = CallerEvent::Expire { what: "recv".into(), waited: SECOND, peer: Some(Rank(2)) };
    net.report(0, event);
    let Error::Timeout { missing, .. } = failure(&net, 0) else { panic!("{}", failure(&net, 0)) };
    assert_eq!(*missing, [rank(2)]);
}

#[test]
fn an_error_of_the_library_ends_the_group_unless_a_better_reason_is_known() {
    let mut net = Network::new(2, 7);
    net.fail_library(0, Error::Transport("internal error".into()));
    net.run_for(2 * LOOK);
    assert!(failure(&net, 0).to_string().contains("internal error"));
    assert!(failure(&net, 1).to_string().contains("rank 10 aborted: transport: internal error"));
    // The library fails because a rank has left without its part.
    let mut net = Network::new(2, 8);
    net.leave(1);
    net.run_for(2 * LOOK);
    net.call(0, all_reduce(8));
    net.fail_library(0, Error::Transport("remote error".into()));
    net.run_for(2 * LOOK);
    assert!(names_lost(failure(&net, 0), 1), "{}", failure(&net, 0));
}

#[test]
fn a_member_that_leaves_in_good_order_is_not_lost() {
    let mut net = Network::new(3, 9);
    net.all_call(all_reduce(8));
    net.run_for(ms(50));
    for member in 0..3 {
        net.leave(member);
    }
    net.run_for(SECOND);
    nobody_fails(&net);
    assert!((0..3).all(|member| !net.is_up(member)));
}

#[test]
fn the_newest_calls_get_a_mark_when_nothing_follows_them() {
    let mut net = Network::new(2, 10);
    for member in 0..2 {
        net.enter(member, all_reduce(8));
    }
    let later = net.now + ms(15);
    let mut look = |exits| {
        let mut actions = Vec::new();
        let seen = Observation { has_answered: true, exits, ..Observation::default() };
        net.nodes[0].core_mut().observe(later, seen, &mut actions);
        actions
    };
    // The call may not be enqueued before its caller has returned.
    let actions = look(0);
    assert!(matches!(actions[..], [Action::Broadcast(_)]), "{actions:?}");
    let actions = look(1);
    assert!(matches!(actions[..], [Action::PlaceMark(1)]), "{actions:?}");
}

// ---- 0016: launches block, initialization does not ------------------------------------------------------------------------

#[test]
fn a_caller_that_stays_inside_the_library_is_given_up_at_its_deadline() {
    let mut net = Network::new(2, 11);
    net.enter(0, all_reduce(8));
    net.run_for(net.timeout + SECOND);
    let said = failure(&net, 0).to_string();
    assert!(
        said.contains("inside the library, timed out") && said.ends_with("rank 11 is not there"),
        "{said}"
    );
}

#[test]
fn a_group_of_calls_has_no_deadline_until_it_ends() {
    let mut net = Network::new(2, 12);
    let at = net.now;
    net.nodes[0].core_mut().caller(at, CallerEvent::GroupStarted { entry: 1, at }, &mut Vec::new());
    net.run_for(10 * net.timeout);
    nobody_fails(&net);
    let deadline = net.now + net.timeout;
    net.report(0, CallerEvent::GroupEnded { deadline, is_captured: false });
    net.run_for(net.timeout + SECOND);
    assert!(failure(&net, 0).to_string().contains("several calls"), "{}", failure(&net, 0));
}

#[test]
fn a_graph_is_watched_and_counts_as_the_same_calls_made_singly() {
    let mut net = Network::new(2, 13);
    let calls = [all_reduce(8), all_reduce(9), all_reduce(8)];
    for _ in 0..10 {
        net.launch(0, &calls);
        for call in calls {
            net.call(1, call);
        }
        net.run_for(ms(7));
    }
    net.run_for(SECOND);
    nobody_fails(&net);
    // A rank that does not make a graph's calls is missing.
    net.launch(0, &calls);
    net.run_for(net.timeout + SECOND);
    assert!(failure(&net, 0).to_string().ends_with("rank 11 is not there"), "{}", failure(&net, 0));
}

#[test]
fn what_is_captured_counts_when_it_is_launched() {
    let mut net = Network::new(2, 14);
    let (at, deadline) = (net.now, net.now + net.timeout);
    let captured =
        Called { stream: 0, entry: 1, call: all_reduce(3), sequence: 1, at, deadline, is_captured: true };
    net.report(0, CallerEvent::Called(captured));
    net.all_call(all_reduce(8));
    net.run_for(SECOND);
    nobody_fails(&net);
}

// ---- 0017: calls are compared next to the GPU ---------------------------------------------------------------------------

fn differs(error: &Error, sequence: u64, theirs: &str) -> bool {
    let said = error.to_string();
    said.contains(&format!("group `g`, call {sequence}:")) && said.contains(theirs)
}

#[test]
fn calls_that_differ_are_named_with_both_ranks_within_three_looks() {
    for hang in [true, false] {
        let mut net = Network::new(3, 15);
        net.divergent_calls_hang = hang;
        for call in 1..=20 {
            for member in 0..3 {
                let odd = call == 12 && member == 1;
                net.call(member, if odd { all_reduce(5) } else { all_reduce(8) });
            }
        }
        let made = net.now;
        net.run_for(SECOND);
        for member in 0..3 {
            let error = failure(&net, member);
            assert!(differs(error, 12, "rank 11 calls all_reduce(sum) of 5 f32"), "hang {hang}: {error}");
            assert!(failed_after(&net, member, made) <= 3 * LOOK + 3 * DELAY);
        }
    }
}

#[test]
fn a_member_that_has_left_is_held_to_the_calls_it_made() {
    let mut net = Network::new(2, 16);
    net.divergent_calls_hang = false;
    net.call(1, send(0, 8));
    net.run_for(LOOK);
    // It leaves after a call that differs from a much later call of the other.
    let event = |call| {
        CallerEvent::Called(Called {
            stream: 0,
            entry: 2,
            call,
            sequence: 1,
            at: Instant::now(),
            deadline: Instant::now() + SECOND,
            is_captured: false,
        })
    };
    net.report(1, event(all_reduce(5)));
    net.report(1, CallerEvent::Idle);
    net.leave(1);
    net.run_for(SECOND);
    nobody_fails(&net);
    net.call(0, all_reduce(8));
    net.run_for(2 * LOOK);
    assert!(differs(failure(&net, 0), 1, "rank 11 calls all_reduce(sum) of 5 f32"), "{}", failure(&net, 0));
}

#[test]
fn a_member_that_has_left_without_a_collective_is_named_with_it() {
    let mut net = Network::new(3, 17);
    net.all_call(all_reduce(8));
    net.run_for(ms(50));
    net.leave(2);
    net.run_for(ms(50));
    let called = net.now;
    for member in [0, 1] {
        net.call(member, all_reduce(9));
    }
    net.run_for(SECOND);
    for member in [0, 1] {
        let error = failure(&net, member);
        assert!(names_lost(error, 2), "{error}");
        let what = "it has left the group without call 2, all_reduce(sum) of 9 f32";
        assert!(error.to_string().contains(what), "{error}");
        assert!(failed_after(&net, member, called) <= LOOK + DELAY);
    }
}

#[test]
fn a_message_that_a_member_has_left_without_sending_is_missed_at_once() {
    let mut net = Network::new(3, 18);
    net.call(2, send(0, 8));
    net.call(0, recv(2, 8));
    net.run_for(ms(50));
    net.leave(2);
    net.run_for(ms(50));
    nobody_fails(&net);
    let called = net.now;
    net.call(0, recv(2, 8));
    net.run_for(SECOND);
    let said = failure(&net, 0).to_string();
    assert!(said.contains("it has left the group without sending message 2 to this rank"), "{said}");
    assert!(failed_after(&net, 0, called) <= LOOK);
}

#[test]
fn a_message_that_a_member_has_left_without_receiving_is_missed_after_a_second_unless_it_was_buffered() {
    for (count, is_missed) in [(8, false), (1 << 20, true)] {
        let mut net = Network::new(2, 19);
        net.leave(1);
        net.run_for(ms(50));
        let called = net.now;
        net.call(0, send(1, count));
        net.mark(0);
        net.run_for(2 * SECOND);
        if !is_missed {
            nobody_fails(&net);
            continue;
        }
        let said = failure(&net, 0).to_string();
        assert!(said.contains("without receiving message 1 from this rank"), "{said}");
        let after = failed_after(&net, 0, called);
        assert!((BUFFERED..BUFFERED + 2 * LOOK).contains(&after), "{after:?}");
    }
}

#[test]
fn a_message_of_another_length_is_named_when_its_sender_has_left() {
    let mut net = Network::new(2, 20);
    net.call(1, send(0, 8));
    net.run_for(ms(50));
    net.leave(1);
    net.run_for(ms(50));
    net.call(0, recv(1, 4000));
    net.run_for(SECOND);
    let said = failure(&net, 0).to_string();
    let what =
        "after it has sent this rank 1 message of 32 bytes; this rank receives 1 message of 16000 bytes";
    assert!(said.contains(what), "{said}");
}

#[test]
fn a_member_that_has_left_is_not_missed_by_messages_between_others() {
    let mut net = Network::new(3, 21);
    // No rank receives it: a message is missing, for a rank that waited for member 2.
    net.call(0, send(2, 8));
    net.run_for(ms(50));
    net.leave(2);
    net.run_for(ms(50));
    net.group(0, &[send(1, 4000), recv(1, 4000)]);
    net.run_for(2 * SECOND);
    nobody_fails(&net);
    net.group(1, &[send(0, 4000), recv(0, 4000)]);
    net.run_for(SECOND);
    nobody_fails(&net);
}

fn verified(net: &Network, member: usize) -> &Result<Vec<Rank>> {
    let verified = net.nodes[member].verified.as_ref();
    verified.unwrap_or_else(|| panic!("seed {}: member {member} has no verdict", net.seed))
}

#[test]
fn members_that_leave_know_that_all_have_made_the_same_calls() {
    let mut net = Network::new(3, 22);
    for _ in 0..50 {
        net.all_call(all_reduce(8));
    }
    net.run_for(ms(100));
    let deadline = net.now + 5 * SECOND;
    for member in 0..3 {
        net.report(member, CallerEvent::Leaving);
        net.report(member, CallerEvent::VerifyCalls { deadline });
    }
    net.run_for(3 * LOOK + DELAY);
    assert!((0..3).all(|member| verified(&net, member).as_ref().is_ok_and(Vec::is_empty)));
}

#[test]
fn a_member_that_has_made_more_calls_is_named_by_the_others() {
    let mut net = Network::new(2, 23);
    net.all_call(all_reduce(8));
    net.run_for(ms(50));
    // It waits for no rank.
    net.enter(1, all_reduce(0));
    net.report(1, CallerEvent::Idle);
    let deadline = net.now + 5 * SECOND;
    for member in 0..2 {
        net.report(member, CallerEvent::Leaving);
        net.report(member, CallerEvent::VerifyCalls { deadline });
    }
    net.run_for(SECOND);
    // The member that has made more misses the other's call; the other is told of it, or finds it itself.
    assert!(
        failure(&net, 1).to_string().contains("it has left the group without call 2"),
        "{}",
        failure(&net, 1)
    );
    assert!(failure(&net, 0).to_string().contains("left the group without call 2"), "{}", failure(&net, 0));
}

#[test]
fn members_whose_calls_could_not_be_compared_in_time_are_named() {
    let mut net = Network::new(3, 24);
    net.all_call(all_reduce(8));
    net.run_for(ms(50));
    net.stop(2);
    let deadline = net.now + SECOND;
    for member in 0..2 {
        net.report(member, CallerEvent::Leaving);
        net.report(member, CallerEvent::VerifyCalls { deadline });
    }
    net.run_for(SECOND + 2 * LOOK);
    for member in 0..2 {
        assert!(
            verified(&net, member).as_ref().is_ok_and(|open| *open == [rank(2)]),
            "{:?}",
            verified(&net, member)
        );
    }
}

#[test]
fn a_divergence_that_nobody_remembers_is_told_after_half_a_second() {
    let mut net = Network::new(2, 25);
    net.divergent_calls_hang = false;
    net.timeout = 60 * SECOND;
    // One look shows thousands of calls at once, so that only the newest heads are compared.
    net.call(1, all_reduce(5));
    net.call(0, all_reduce(8));
    for _ in 0..=REMEMBERED {
        net.enter(0, all_reduce(8));
        net.enter(1, all_reduce(8));
    }
    net.run_for(2 * SECOND);
    let said = failure(&net, 0).to_string();
    assert!(said.contains("a call that is not remembered any more"), "{said}");
}

// ---- seeded runs ----------------------------------------------------------------------------------------------------

/// The fault of the last member of a group, some time into a run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Fault {
    Nothing,
    /// Its process dies.
    Kill,
    /// Its link to the first member breaks.
    Cut,
    /// It makes no more calls.
    Stall,
    /// Its process is stopped beyond the deadline.
    Stop,
    /// Its process is stopped, and continues before the deadline.
    Pause,
    /// It makes another call than the others.
    Diverge,
    /// It leaves before the other members are done.
    Leave,
}

const FAULTS: [Fault; 8] = [
    Fault::Nothing,
    Fault::Kill,
    Fault::Cut,
    Fault::Stall,
    Fault::Stop,
    Fault::Pause,
    Fault::Diverge,
    Fault::Leave,
];

/// Runs of the seeded test.
const RUNS: u64 = 4000;

#[test]
fn in_every_seeded_run_the_fault_is_found_in_time_and_the_right_member_is_named() {
    let began = Instant::now();
    let first = std::env::var("RYZ_TEST_SEED").ok().and_then(|seed| seed.parse().ok());
    let seeds = first.map_or(0..RUNS, |seed: u64| seed..seed + 1);
    let (mut actions, mut runs) = (0, 0);
    for seed in seeds.clone() {
        actions += run(seed);
        runs += 1;
    }
    println!(
        "{runs} runs, seeds {seeds:?} (RYZ_TEST_SEED repeats one), {actions} actions, in {:?}",
        began.elapsed()
    );
}

/// Runs members that make the same calls, each at its own pace, with a fault in the middle. Returns the number of actions.
fn run(seed: u64) -> u64 {
    let mut net = Network::new(2, seed);
    let members = net.rng.random_range(2..6);
    net = Network::new(members, seed);
    let fault = FAULTS[net.rng.random_range(0..FAULTS.len())];
    let culprit = members - 1;
    let calls = net.rng.random_range(5..120);
    let at = net.rng.random_range(1..calls);
    net.divergent_calls_hang = net.rng.random_bool(0.5);
    // A pause is so short that no deadline passes in the meantime.
    net.timeout = if fault == Fault::Pause { 60 * SECOND } else { ms(net.rng.random_range(500..8000)) };
    let pace = Duration::from_micros(net.rng.random_range(1..20_000));
    let mut struck = net.now;
    for call in 0..calls {
        if call == at {
            struck = net.now;
            strike(&mut net, fault, culprit);
        }
        let is_stalled = fault == Fault::Stall && call >= at;
        let order = net.rng.random_range(0..members);
        for member in (0..members).map(|index| (index + order) % members) {
            if member == culprit && is_stalled {
                continue;
            }
            let diverges = fault == Fault::Diverge && call == at && member == culprit;
            make(&mut net, member, call, diverges);
            if net.rng.random_bool(0.1) {
                net.run_for(pace / 4);
            }
        }
        net.run_for(pace);
    }
    if fault == Fault::Pause {
        net.resume(culprit);
        // It makes the calls that it missed.
        for call in at..calls {
            make(&mut net, culprit, call, false);
        }
    }
    let patience = if fault == Fault::Pause { SECOND } else { net.timeout + 2 * SECOND };
    let context = format!("seed {seed}: {fault:?} of member {culprit} of {members} at call {at} of {calls}");
    net.run_for(patience);
    judge(&net, fault, culprit, (struck, at), &context);
    if fault == Fault::Nothing {
        let deadline = net.now + 5 * SECOND;
        for member in 0..members {
            net.report(member, CallerEvent::Leaving);
            net.report(member, CallerEvent::VerifyCalls { deadline });
        }
        net.run_for(4 * LOOK + DELAY);
        for member in 0..members {
            assert!(verified(&net, member).as_ref().is_ok_and(Vec::is_empty), "{context}");
        }
    }
    net.actions
}

fn strike(net: &mut Network, fault: Fault, culprit: usize) {
    match fault {
        Fault::Nothing | Fault::Stall | Fault::Diverge => {}
        Fault::Kill => net.kill(culprit),
        Fault::Cut => net.cut(culprit, 0),
        Fault::Stop | Fault::Pause => net.stop(culprit),
        Fault::Leave => net.leave(culprit),
    }
}

/// Makes one step of the program that all members run: single calls, groups of calls and graphs, determined by the number.
fn make(net: &mut Network, member: usize, call: usize, diverges: bool) {
    if diverges {
        let operation = Operation::AllReduce(ReduceOp::Max);
        return net.call(member, CallFingerprint { operation, ..all_reduce(8) });
    }
    match call % 7 {
        5 => net.launch(member, &[all_reduce(call), all_reduce(8)]),
        6 => net.group(member, &[all_reduce(1), all_reduce(2), all_reduce(3)]),
        _ => net.call(member, all_reduce(8 + call)),
    }
}

fn judge(net: &Network, fault: Fault, culprit: usize, (struck, at): (Instant, usize), context: &str) {
    let survivors = || (0..net.nodes.len()).filter(|member| *member != culprit);
    let each = |check: &dyn Fn(usize, &Error, Duration)| {
        for member in survivors() {
            let Some((failed, error)) = &net.nodes[member].failure else {
                panic!("{context}: member {member} does not fail");
            };
            check(member, error, failed.saturating_duration_since(struck));
        }
    };
    // No other member is ever reported as unresponsive.
    for member in survivors() {
        for (_, told, _) in &net.nodes[member].told {
            let is_stopped = matches!(fault, Fault::Stop | Fault::Pause);
            assert!(is_stopped && *told == culprit, "{context}: member {member} suspects {told}");
        }
    }
    match fault {
        Fault::Nothing | Fault::Pause => {
            for (member, node) in net.nodes.iter().enumerate() {
                assert!(node.failure.is_none(), "{context}: member {member} fails: {:?}", node.failure);
            }
        }
        Fault::Kill => each(&|member, error, after| {
            assert!(names_lost(error, culprit), "{context}: member {member}: {error}");
            assert!(after <= DELAY, "{context}: member {member} after {after:?}");
        }),
        Fault::Cut => {
            assert!(names_lost(failure(net, 0), culprit), "{context}: {}", failure(net, 0));
            for member in survivors().skip(1) {
                let error = failure(net, member);
                assert!(
                    names_lost(error, culprit) || names_lost(error, 0),
                    "{context}: member {member}: {error}"
                );
            }
        }
        Fault::Stall | Fault::Stop => each(&|member, error, after| {
            let said = error.to_string();
            let is_named = said.ends_with(&format!("rank {} is not there", rank(culprit)))
                || fault == Fault::Stop && names_unresponsive(error, culprit);
            assert!(is_named, "{context}: member {member}: {said}");
            let latest = net.timeout + ANSWERS + 4 * LOOK + 4 * DELAY;
            assert!(after <= latest, "{context}: member {member} after {after:?} of {latest:?}");
        }),
        Fault::Diverge => each(&|member, error, after| {
            let said = error.to_string();
            // The first of the calls that differ has this number, or the previous one if a graph or group came between.
            let named =
                said.contains("mismatched calls") && said.contains(&format!("rank {} calls", rank(culprit)));
            assert!(named && said.contains("all_reduce(max) of 8 f32"), "{context}: member {member}: {said}");
            let latest = 4 * LOOK + 4 * DELAY + Duration::from_millis(20) * 2 * at.min(1) as u32;
            assert!(after <= latest, "{context}: member {member} after {after:?} of {latest:?}");
        }),
        Fault::Leave => each(&|member, error, after| {
            assert!(names_lost(error, culprit), "{context}: member {member}: {error}");
            assert!(
                error.to_string().contains("left the group without call"),
                "{context}: member {member}: {error}"
            );
            assert!(after <= 4 * LOOK + 4 * DELAY + ms(80), "{context}: member {member} after {after:?}");
        }),
    }
}

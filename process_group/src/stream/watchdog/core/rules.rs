//! Rules of decisions 0014, 0016 and 0017 as scripts: those that the runs do not check, because they need an exact time, a text, or
//! an event that no run contains.

use std::time::{Duration, Instant};

use super::network::{LOOK, Life, Network, all_reduce, blamed, rank, recv, send};
use super::*;
use crate::types::history::REMEMBERED;

/// More than the time of a message in transit.
const DELAY: Duration = Duration::from_millis(4);
const SECOND: Duration = Duration::from_secs(1);

fn ms(milliseconds: u64) -> Duration {
    Duration::from_millis(milliseconds)
}

fn failure(net: &Network, member: usize) -> &Error {
    net.nodes[member].failure().unwrap_or_else(|| panic!("member {member} has not failed"))
}

/// Checks that a member has failed, and that its error says this.
#[track_caller]
fn says(net: &Network, member: usize, what: &str) {
    let said = failure(net, member).to_string();
    assert!(said.contains(what), "member {member}: {said}");
}

fn failed_after(net: &Network, member: usize, since: Instant) -> Duration {
    failure(net, member);
    net.nodes[member].failures[0].0.saturating_duration_since(since)
}

#[track_caller]
fn nobody_fails(net: &Network) {
    for (member, node) in net.nodes.iter().enumerate() {
        assert!(node.failures.is_empty(), "member {member} fails: {:?}", node.failure());
    }
}

// ---- 0014: the library is watched from outside ------------------------------------------------------------------------

#[test]
fn a_member_that_dies_is_named_with_its_host_and_process_and_the_call_that_waits_for_it() {
    let mut net = Network::new(2);
    net.call(0, all_reduce(9));
    net.kill(1);
    net.run_for(DELAY);
    says(&net, 0, "lost rank 11 (host host-1, pid 1001) during all_reduce(sum) of 9 f32");
}

#[test]
fn a_member_that_gives_up_says_why_to_all_others() {
    let mut net = Network::new(3);
    net.report(1, CallerEvent::Abort(Error::Transport("out of memory".into())));
    net.run_for(DELAY);
    for member in [0, 2] {
        says(&net, member, "rank 11 aborted: transport: out of memory");
    }
}

#[test]
fn missing_members_are_named_at_the_deadline_after_half_a_second_if_they_do_not_answer() {
    for (is_stopped, wait) in [(false, Duration::ZERO), (true, ANSWERS)] {
        let mut net = Network::new(3);
        for member in [0, 2] {
            net.call(member, all_reduce(8));
        }
        if is_stopped {
            net.node(1).life = Life::Stopped;
        }
        let (called, earliest) = (net.now, net.timeout + wait);
        net.run_for(earliest + SECOND);
        for member in [0, 2] {
            says(&net, member, "rank 11 is not there");
            let after = failed_after(&net, member, called);
            assert!((earliest..earliest + 2 * LOOK + DELAY).contains(&after), "{after:?}");
        }
    }
}

#[test]
fn a_member_that_gives_up_without_having_called_is_missing_at_a_deadline() {
    let mut net = Network::new(3);
    for member in [0, 1] {
        net.call(member, all_reduce(8));
    }
    // It gives up before it learns that the others ask.
    net.node(2).life = Life::Stopped;
    net.run_for(net.timeout + LOOK);
    net.report(2, CallerEvent::Abort(Error::Transport("out of memory".into())));
    // It tells its progress with the reason, so nobody waits for its answer.
    net.run_for(DELAY);
    for member in [0, 1] {
        says(&net, member, "rank 12 is not there");
    }
}

#[test]
fn a_member_whose_process_is_stopped_is_unresponsive_and_one_that_computes_is_not() {
    for continues in [true, false] {
        let mut net = Network::new(4);
        net.timeout = 10 * SECOND;
        for member in [0, 2] {
            net.call(member, all_reduce(8));
        }
        // One member is stopped, another computes.
        net.node(1).life = Life::Stopped;
        net.run_for(5 * SECOND);
        for member in [0, 2] {
            let told = &net.nodes[member].told;
            assert!(matches!(told[..], [(_, 1, true)]), "{told:?}");
        }
        if continues {
            net.node(1).life = Life::Lives;
            for member in [1, 3] {
                net.call(member, all_reduce(8));
            }
            net.run_for(20 * SECOND);
            nobody_fails(&net);
            assert!(matches!(net.nodes[0].told[..], [_, (_, 1, false)]), "{:?}", net.nodes[0].told);
        } else {
            net.run_for(6 * SECOND);
            for member in [0, 2] {
                says(&net, member, "unresponsive");
                assert_eq!(blamed(failure(&net, member)), [rank(1)]);
            }
        }
    }
}

#[test]
fn a_member_that_has_left_in_good_order_is_not_unresponsive() {
    let mut net = Network::new(3);
    net.timeout = 10 * SECOND;
    net.leave(2);
    net.run_for(SECOND);
    net.call(0, recv(1, 8));
    net.run_for(8 * SECOND);
    assert_eq!(net.nodes[0].told, []);
}

#[test]
fn a_caller_blocked_in_a_copy_blames_those_with_the_fewest_calls() {
    let mut net = Network::new(4);
    net.all_call(all_reduce(8));
    net.run_for(ms(50));
    // One member is stuck; another waits for it in an earlier call than the two that are blocked in copies.
    for member in [0, 1] {
        net.node(member).is_held_up = true;
    }
    for (member, calls) in [(0, 3), (1, 3), (2, 2), (3, 1)] {
        for _ in 0..calls {
            net.call(member, all_reduce(8));
            net.run_for(ms(5));
        }
    }
    net.run_for(net.timeout + SECOND);
    for member in 0..4 {
        says(&net, member, ": rank 13 is not there");
    }
}

#[test]
fn a_wait_that_expires_for_a_message_names_its_peer_without_asking() {
    let mut net = Network::new(3);
    net.call(0, recv(2, 8));
    net.report(0, CallerEvent::Expire { what: "recv".into(), waited: SECOND, peer: Some(Rank(2)) });
    assert_eq!(blamed(failure(&net, 0)), [rank(2)]);
}

#[test]
fn an_error_of_the_library_ends_the_group_unless_a_better_reason_is_known() {
    let mut net = Network::new(2);
    net.node(0).error = Some(Error::Transport("internal error".into()));
    net.run_for(2 * LOOK);
    says(&net, 0, "internal error");
    says(&net, 1, "rank 10 aborted: transport: internal error");
    // The library fails because a rank has left without its part.
    let mut net = Network::new(2);
    net.leave(1);
    net.run_for(2 * LOOK);
    net.call(0, all_reduce(8));
    net.node(0).error = Some(Error::Transport("remote error".into()));
    net.run_for(2 * LOOK);
    says(&net, 0, "lost rank 11");
}

#[test]
fn the_newest_calls_get_a_mark_when_nothing_follows_them() {
    let mut net = Network::new(2);
    net.enter(0, all_reduce(8));
    let later = net.now + ms(15);
    let mut look = |exits| {
        let mut actions = Vec::new();
        let seen = Observation { has_answered: true, exits, ..Observation::default() };
        net.node(0).core.observe(later, seen, &mut actions);
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
    let mut net = Network::new(2);
    net.enter(0, all_reduce(8));
    net.run_for(net.timeout + SECOND);
    says(&net, 0, "inside the library, timed out");
    says(&net, 0, ": rank 11 is not there");
}

#[test]
fn a_group_of_calls_has_no_deadline_until_it_ends() {
    let mut net = Network::new(2);
    net.report(0, CallerEvent::GroupStarted { entry: 1, at: net.now });
    net.run_for(10 * net.timeout);
    nobody_fails(&net);
    net.report(0, CallerEvent::GroupEnded { deadline: net.now + net.timeout, is_captured: false });
    net.run_for(net.timeout + SECOND);
    says(&net, 0, "several calls");
}

#[test]
fn what_is_captured_counts_when_it_is_launched() {
    let mut net = Network::new(2);
    let (at, deadline, call) = (net.now, net.now + net.timeout, all_reduce(3));
    let called = Called { stream: 0, entry: 1, call, sequence: 1, at, deadline, is_captured: true };
    net.report(0, CallerEvent::Called(called));
    net.all_call(all_reduce(8));
    net.run_for(SECOND);
    nobody_fails(&net);
}

// ---- 0017: calls are compared next to the GPU ---------------------------------------------------------------------------

#[test]
fn a_member_that_has_left_is_held_to_the_calls_it_made() {
    let mut net = Network::new(2);
    // It leaves after a call that differs from a much later call of the other.
    net.enter(1, all_reduce(5));
    net.report(1, CallerEvent::Idle);
    net.leave(1);
    net.run_for(SECOND);
    nobody_fails(&net);
    net.call(0, all_reduce(8));
    net.run_for(2 * LOOK);
    says(
        &net,
        0,
        "mismatched calls in group `g`, call 1: rank 10 calls all_reduce(sum) of 8 f32, rank 11 calls all_reduce(sum) of 5",
    );
}

#[test]
fn a_message_that_a_member_has_left_without_is_missed_unless_it_may_be_buffered() {
    let short = (
        send(0, 8),
        recv(1, 4000),
        "after it has sent this rank 1 message of 32 bytes; this rank receives 1 message of 16000",
    );
    let unsent = (send(0, 8), recv(1, 8), "it has left the group without sending message 2 to this rank");
    let unreceived = (recv(0, 8), send(1, 1 << 20), "without receiving message 2 from this rank");
    let buffered = (recv(0, 8), send(1, 8), "");
    let soon = Duration::ZERO..LOOK + DELAY;
    let late = BUFFERED..BUFFERED + 2 * LOOK;
    for ((theirs, mine, what), window) in
        [(short, &soon), (unsent, &soon), (unreceived, &late), (buffered, &late)]
    {
        let mut net = Network::new(3);
        net.call(1, theirs);
        if what.contains("message 2") || what.is_empty() {
            net.call(0, CallFingerprint { count: 8, ..mine });
        }
        net.run_for(ms(50));
        net.leave(1);
        net.run_for(ms(50));
        nobody_fails(&net);
        let called = net.now;
        net.call(0, mine);
        net.run_for(2 * SECOND);
        if what.is_empty() {
            nobody_fails(&net);
            continue;
        }
        says(&net, 0, what);
        let after = failed_after(&net, 0, called);
        assert!(window.contains(&after), "{after:?}: {what}");
    }
}

#[test]
fn a_member_that_has_left_is_not_missed_by_messages_between_others() {
    let mut net = Network::new(3);
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

#[test]
fn a_message_of_a_member_that_has_left_is_not_missed() {
    let mut net = Network::new(3);
    // No rank receives the first: that is no reason to miss a message in the other direction.
    net.call(0, send(1, 8));
    net.call(1, send(0, 8));
    net.run_for(ms(50));
    net.leave(1);
    net.run_for(ms(50));
    // Only member 2 is waited for.
    net.group(0, &[recv(1, 8), recv(2, 8)]);
    net.run_for(2 * SECOND);
    nobody_fails(&net);
    net.call(2, send(0, 8));
    net.run_for(SECOND);
    nobody_fails(&net);
}

#[test]
fn a_member_that_has_made_more_calls_is_named_by_the_others() {
    let mut net = Network::new(2);
    net.all_call(all_reduce(8));
    net.run_for(ms(50));
    // It waits for no rank.
    net.enter(1, all_reduce(0));
    net.report(1, CallerEvent::Idle);
    net.leave_verified([0, 1], 5 * SECOND);
    net.run_for(SECOND);
    // The member that has made more calls misses one of the other's. It tells the other, or the other finds out.
    for member in [0, 1] {
        says(&net, member, "left the group without call 2");
    }
}

#[test]
fn a_member_that_has_left_after_more_calls_is_named_when_the_others_leave() {
    let mut net = Network::new(2);
    net.enter(1, all_reduce(0));
    net.report(1, CallerEvent::Idle);
    net.leave(1);
    net.run_for(ms(50));
    net.leave_verified([0], 5 * SECOND);
    net.run_for(SECOND);
    let Some(Err(error)) = &net.nodes[0].verified else { panic!("{:?}", net.nodes[0].verified) };
    assert!(error.to_string().contains("they differ in the number of calls"), "{error}");
}

#[test]
fn members_whose_calls_could_not_be_compared_in_time_are_named() {
    let mut net = Network::new(3);
    net.all_call(all_reduce(8));
    net.run_for(ms(50));
    net.node(2).life = Life::Stopped;
    net.leave_verified([0, 1], SECOND);
    net.run_for(SECOND + 2 * LOOK);
    for member in [0, 1] {
        let verified = &net.nodes[member].verified;
        assert!(matches!(verified, Some(Ok(open)) if *open == [rank(2)]), "{verified:?}");
    }
}

#[test]
fn a_divergence_that_nobody_remembers_is_told_after_half_a_second() {
    let mut net = Network::new(2);
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
    says(&net, 0, "a call that is not remembered any more");
}

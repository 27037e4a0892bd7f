//! The common phrases of the launcher and `ryz status`.

use ryzanstein_process_group::CurrentCall;

use super::wire::NoProgress;
use crate::plural;

/// Formats a phrase: `it has not begun call 41 (all_reduce) of group 'world', in which 3 ranks have waited for 5 s`.
pub(crate) fn no_progress(call: &NoProgress, own: Option<&(String, CurrentCall)>) -> String {
    let NoProgress { group, call, operation, waiting, waited_s } = call;
    let have = if *waiting == 1 { "has" } else { "have" };
    let ranks = plural(*waiting as usize, "rank");
    let own = own.map_or_else(String::new, |(group, own)| {
        let (number, operation) = (own.number, &own.operation);
        format!("; it waits in call {number} ({operation}) of group '{group}' itself")
    });
    let seconds = *waited_s as u64;
    format!(
        "it has not begun call {call} ({operation}) of group '{group}', in which {ranks} {have} waited for {seconds} s{own}"
    )
}

/// Formats the state of a process: `S (sleeping)`.
pub(crate) fn process_state(letter: char) -> String {
    let meaning = match letter {
        'R' => " (running)",
        'S' => " (sleeping)",
        'D' => " (waits in the kernel for a disk or a device)",
        'T' => " (stopped)",
        't' => " (stopped by a debugger)",
        'Z' => " (dead, not reaped)",
        _ => "",
    };
    format!("{letter}{meaning}")
}

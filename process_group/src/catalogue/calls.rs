//! Calls that fail because of actions of the ranks.

use super::Entry;
use super::Source::Provoked;

pub(super) const ENTRIES: &[Entry] = &[
    Entry {
        id: "calls-differ",
        patterns: &["mismatched calls in group"],
        sample: "error: mismatched calls in group `world`, call 15: rank 0 calls all_reduce(sum) of 96 f32, rank 1 calls \
                 all_reduce(sum) of 144 f32; they differ in length. Every rank of a group must make the same calls in the \
                 same order",
        source: Provoked,
        cause: "the program does different things on different ranks: a branch on the rank, another order of iteration, a \
                different prompt. No call returned a wrong result; on GPUs, where calls are compared afterwards, results of \
                the last 60 ms may be wrong",
        remedy: "find the first call that differs: the number counts the calls of that group from 1, those of the self-check \
                 included, and `ryz trace` compares the ranks' flight records",
        is_plain: false,
    },
    Entry {
        id: "lost-rank",
        patterns: &["lost rank * during "],
        sample: "error: lost rank 1 (host node0, pid 23689) during all_reduce(sum) of 25000000 f32: its end of the connection \
                 was closed",
        source: Provoked,
        cause: "the process of that rank is gone, and this error is only an echo of it",
        remedy: "read that rank's own error, in its log or in the launcher's closing report; if it wrote none, look for the \
                 out-of-memory killer with `dmesg`",
        is_plain: false,
    },
    Entry {
        id: "rank-stopped",
        patterns: &[
            "is unresponsive: stopped by signal",
            "its process is stopped (signal",
            "is unresponsive: its process is stopped, or",
        ],
        sample: "rank 1 (host node0, pid 4711) is unresponsive: stopped by signal 19 (SIGSTOP); the other ranks wait for \
                 it (kill -CONT 4711 continues it)",
        source: Provoked,
        cause: "somebody stopped the process of that rank, with `kill -STOP`, a debugger or a tool that freezes jobs; or its \
                host or network is down",
        remedy: "continue it with `kill -CONT` and its pid before process_group.timeout ends; otherwise the other ranks give up",
        is_plain: false,
    },
    Entry {
        id: "call-timed-out",
        patterns: &["timed out after *: rank * is not there", "timed out after *: ranks * are not there"],
        sample: "error: barrier in group `world` (call 1370) timed out after 3.3s: rank 1 is not there",
        source: Provoked,
        cause: "that rank did not make this call within process_group.timeout: it is stuck, busy or elsewhere in the program",
        remedy: "see what it does with `ryz status`, py-spy or `gdb -p`; if the work before the call takes that long, raise \
                 process_group.timeout",
        is_plain: false,
    },
    Entry {
        id: "call-too-slow",
        patterns: &["timed out after *: every rank is there, but not finished"],
        sample: "error: all_reduce(sum) of 4 f32 timed out after 5m: every rank is there, but not finished",
        source: Provoked,
        cause: "all ranks made the call, and its data did not arrive in time: a slow or broken network, or a GPU that does \
                not get on",
        remedy: "measure the same size with `ryz bench`, examine each host with `ryz doctor`, or raise process_group.timeout",
        is_plain: false,
    },
    Entry {
        id: "self-check-failed",
        patterns: &["self-check of * failed:"],
        sample: "error: self-check of nccl failed: element 3 is 5, expected 6; this path is refused",
        source: Provoked,
        cause: "the start-up check got wrong values on this path, so that every result of the job might be wrong: defective \
                hardware, a defective library, or peer access between GPUs that the machine only claims to have",
        remedy: "examine the machine with `ryz doctor`; on GPUs, try NCCL_P2P_DISABLE=1, then another NCCL through device.nccl",
        is_plain: false,
    },
    Entry {
        id: "slow-call",
        patterns: &["slow collective"],
        sample: "WARN slow collective group=world op=all_reduce(sum) bytes=10000000 path=tcp/direct milliseconds=20.56",
        source: Provoked,
        cause: "a call took longer than profile.slow_call, and than its bytes need at 0.1 GB/s on CPUs or 10 GB/s on GPUs: more \
                ranks than CPUs, or a slow network; on GPUs the time includes waiting for a late rank",
        remedy: "none is needed; raise profile.slow_call, or see the book's page on performance",
        is_plain: false,
    },
];

use std::collections::BTreeSet;

use std::num::NonZeroUsize;

use super::*;

fn id(text: &str) -> Option<&'static str> {
    find(text).map(|entry| &*entry.id)
}

#[test]
fn the_file_is_well_formed() {
    if let Err(error) = Catalogue::parse(include_str!("catalogue.toml")) {
        panic!("{error}");
    }
}

#[test]
fn every_entry_has_an_id_of_its_own_and_explains_its_sample_before_all_others() {
    let mut ids = BTreeSet::new();
    for entry in sections().iter().flat_map(|section| &section.entries) {
        assert!(ids.insert(&entry.id), "{} is there twice", entry.id);
        assert_eq!(id(&entry.sample), Some(&*entry.id), "{}", entry.sample);
        assert!(!entry.sample.contains('\n') && entry.sample.len() < 400, "{}: one line", entry.id);
        for pattern in &entry.patterns {
            assert_eq!(*pattern, pattern.to_ascii_lowercase(), "{}", entry.id);
        }
        for text in [&entry.cause, &entry.remedy] {
            let is_clause = !text.is_empty() && !text.ends_with('.') && !text.contains("  ");
            assert!(is_clause, "{}: {text}", entry.id);
        }
        if let Some(source) = &entry.source {
            assert!(source.starts_with("https://"), "{}: {source}", entry.id);
        }
    }
    assert!(ids.len() > 100, "only {} entries", ids.len());
}

#[test]
fn a_pattern_does_not_cross_lines_and_the_best_entry_of_all_lines_wins() {
    let text = "ncclSystemError: System call failed\nError: failed to extend /dev/shm/nccl-x to 4 bytes";
    assert_eq!(id(text), Some("shared-memory-too-small"));
    assert_eq!(id("connect to\n<1> failed : connection\nrefused"), None);
}

#[test]
fn colours_prefixes_and_letter_case_hide_no_error() {
    for text in [
        "\x1b[31m[rank 3]\x1b[0m CUDA error: out \x1b[1mof\x1b[0m memory",
        "[rank3]: 2026-01-02T03:04:05Z trainer.py:17 CUDA ERROR: OUT OF MEMORY",
        "\x1b]8;;https://example.org\x1b\\cuda\x1b]8;;\x07 error: out of memory",
    ] {
        assert_eq!(id(text), Some("gpu-memory-full"), "{text}");
    }
}

#[test]
fn words_of_an_error_in_a_line_about_something_else_are_not_explained() {
    for text in [
        "pcieport 0000:00:03.0: PCIe Bus Error: severity=Corrected, type=Data Link Layer, (Transmitter ID)",
        "memory.events: low 0 high 0 max 0 oom 0 oom_kill 0",
        "oom_kill_disable 0",
        "\"OOMKilled\": false,",
        "node:1:1 [0] NCCL WARN getsockopt failed: Invalid argument",
        "recv failed: Resource temporarily unavailable (os error 11)",
        "n:1:1 [6] proxy.cc:1458 NCCL WARN [Service thread] Accept failed Resource temporarily unavailable",
        "Setting NCCL timeout to 1800 seconds",
        "NCCL timeout = 1800s",
        "curl: (28) connect() timed out!",
        "mkdir /sys/fs/cgroup/memory/docker/406c: no space left on device",
        "inotify_add_watch failed: No space left on device",
        "semget: No space left on device",
        "GPU 0: Xid errors: 0",
        "nvidia-container-cli: container error: cgroup subsystem devices not found",
        "oom kill event count: 0",
        "transaction xid 1234",
        "transaction xid 31 committed",
        "runtime error: load of misaligned address 0x1 for type 'int'",
    ] {
        assert_eq!(id(text), None, "{text}");
    }
}

#[test]
fn an_error_is_known_in_the_words_of_each_library() {
    for (expected, text) in [
        ("out-of-memory-kill", "memory.events: low 0 high 0 max 7 oom 2 oom_kill 1"),
        ("out-of-memory-kill", "\"OOMKilled\": true,"),
        ("killed", "mpirun noticed that process rank 3 with PID 0 on node n1 exited on signal 9 (Killed)."),
        ("bus-error", "t.sh: line 1: 1234 Bus error               (core dumped) ./x"),
        ("bus-error", "ERROR: Unexpected bus error encountered in worker."),
        ("bus-error", "mpirun noticed that process rank 3 with PID 0 on node n1 exited on signal 7."),
        ("crashed", "container exited with code 139"),
        ("crashed", "mpirun noticed that process rank 3 with PID 0 on node n1 exited on signal 11."),
        ("nccl-unreachable", "NCCL WARN Connect to fe80::ec4:7aff%eno1<39541> failed : Invalid argument"),
        ("gpu-off-the-bus", "Unable to determine the device handle for GPU0000:03:00.0: Unknown Error"),
        ("xid-memory-broken", "I0101 nvidia.go:123] XidCriticalError: Xid=48 on Device=GPU-1"),
        ("xid-memory-contained", "GPU 3: Xid 94"),
        ("gpu-busy", "RuntimeError: CUDA error: all CUDA-capable devices are busy or unavailable"),
        ("driver-updated", "NVRM: API mismatch: the client has the version 535.104.05"),
        ("kernel-not-for-this-gpu", "CUDA error: device kernel image is invalid"),
        ("kernel-not-for-this-gpu", "CUDA error: a PTX JIT compilation failed"),
        ("kernel-went-astray", "RuntimeError: CUDA error: misaligned address"),
        ("kernel-went-astray", "RuntimeError: CUDA error: an illegal instruction was encountered"),
        ("kernel-went-astray", "CUDA error: operation not supported on global/shared address space"),
        ("kernel-went-astray", "CUDA error: invalid program counter"),
        ("gpu-after-fork", "RuntimeError: CUDA error: initialization error"),
        ("gpu-after-fork", "RuntimeError: CUDA error: driver shutting down"),
        ("stream-is-captured", "CUDA error: operation failed due to a previous error during capture"),
        ("too-many-threads", "RuntimeError: can't start new thread"),
        ("too-many-threads", "bash: fork: retry: Resource temporarily unavailable"),
        (
            "too-many-threads",
            "error: cannot wait for SIGUSR1: Resource temporarily unavailable (os error 11)",
        ),
        ("too-many-threads", "cannot start the supervisor: Resource temporarily unavailable (os error 11)"),
        ("torch-store-unreachable", "RuntimeError: connect() timed out. Original timeout was 1800000 ms."),
        ("torch-collective-timeout", "RuntimeError: NCCL timeout in all_reduce"),
        (
            "nccl-nvls",
            "nvls.cc:379 NCCL WARN Failed to bind NVLink SHARP (NVLS) Multicast memory of size 2097152 : CUDA error 401",
        ),
        ("driver-too-old", "CUDA error: the provided PTX was compiled with an unsupported toolchain."),
        (
            "driver-too-old",
            "nvidia-container-cli: requirement error: unsatisfied condition: cuda>=11.0, please update your driver",
        ),
        ("too-many-threads", "  what():  Resource temporarily unavailable"),
        ("no-memory", "terminate called after throwing an instance of 'std::bad_alloc'"),
        ("no-memory", "MemoryError"),
        ("no-memory", "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 5.00 GiB"),
        ("disk-full", "OSError: [Errno 122] Disk quota exceeded"),
    ] {
        assert_eq!(id(text), Some(expected), "{text}");
    }
}

const ABORT: &str = "\
[rank1]:[E ProcessGroupNCCL.cpp:2068] watchdog thread terminated: CUDA error: an illegal memory access was encountered
Exception raised from c10_cuda_check_implementation at CUDAException.cpp:43 (most recent call first):
frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x98 (0x7fd00ae6c1b8 in libc10.so)
frame #1: out of memory(Address already in use) + 0xe0 (0x7fd00ae15a76 in libc10.so)
<omitting python frames>
frame #9: clone + 0x43 (0x7fd0565ea133 in libc.so.6)
";

#[test]
fn an_abort_is_explained_by_the_error_above_its_frames() {
    assert_eq!(id(ABORT), Some("kernel-went-astray"));
    let first = ABORT.lines().next().expect("a line");
    assert_eq!(telling_lines(ABORT.lines(), NonZeroUsize::new(12).expect("not zero")), [first]);
}

#[test]
fn stack_traces_are_left_out_of_the_telling_lines() {
    for (tail, expected) in [
        (
            "Traceback (most recent call last):\n  File \"a.py\", line 3, in main\n    raise X('Address already in use')\n    \
             ^^^^^^^\nValueError: no such thing\n",
            "ValueError: no such thing",
        ),
        (
            "[rank0]: Traceback (most recent call last):\n[rank0]:   File \"a.py\", line 3, in main\n[rank0]:     x()\n[rank0]: \
             ValueError: no such thing",
            "[rank0]: ValueError: no such thing",
        ),
        (
            "thread 'main' panicked at src/main.rs:2:5:\nindex out of bounds\nstack backtrace:\n   0: rust_begin_unwind\n             \
             at /rustc/1/library/std/src/panicking.rs:5:5\n   1: core::panicking::panic_fmt\n   2: <&dyn core::ops::Fn() -> \
             Result<(), Error> as core::ops::FnOnce<()>>::call_once\nnote: run with \
             `RUST_BACKTRACE=full` for a verbose backtrace.",
            "thread 'main' panicked at src/main.rs:2:5:\nindex out of bounds",
        ),
        ("\n\nonly a text\n", "only a text"),
        ("frame #0: a + 0x1 (0x2 in c)", "frame #0: a + 0x1 (0x2 in c)"),
        ("", ""),
    ] {
        assert_eq!(
            telling_lines(tail.lines(), NonZeroUsize::new(12).expect("not zero")).join("\n"),
            expected
        );
    }
}

#[test]
fn of_too_many_lines_the_last_stay_and_the_one_that_is_explained_best() {
    let lines = ["one", "CUDA error: out of memory", "two", "Broken pipe (os error 32)", "three", "four"];
    assert_eq!(
        telling_lines(lines, NonZeroUsize::new(3).expect("not zero")),
        ["CUDA error: out of memory", "three", "four"]
    );
    assert_eq!(telling_lines(lines, NonZeroUsize::new(6).expect("not zero")), lines);
    assert_eq!(
        telling_lines(
            ["CUDA error: out of memory", "a", "no route to host"],
            NonZeroUsize::new(2).expect("not zero")
        ),
        ["CUDA error: out of memory", "no route to host"]
    );
    assert_eq!(telling_lines(["a", "b", "c"], NonZeroUsize::new(2).expect("not zero")), ["b", "c"]);
}

//! A group on shared memory leaves nothing behind. A test program of its own: nothing else changes its descriptors and mappings.

use std::sync::Mutex;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::thread::sleep;
use std::time::{Duration, Instant};

use ryzanstein_config::BackendChoice;
use ryzanstein_process_group::ReduceOp;
use ryzanstein_process_group::paths::Path;
use ryzanstein_tests::{config, in_good_order, on_hosts};

/// One test at a time: they look at what the process holds.
static ALONE: Mutex<()> = Mutex::new(());

/// Entries of `/proc/self/fd` and `/proc/self/task`, and shared segments in `/proc/self/maps`.
fn held() -> [usize; 3] {
    let entries = |path: &str| std::fs::read_dir(path).expect("it is there").count();
    let maps = std::fs::read_to_string("/proc/self/maps").expect("it is there");
    let segments = maps.lines().filter(|line| line.contains("memfd:ryz-shared")).count();
    [entries("/proc/self/fd"), entries("/proc/self/task"), segments]
}

/// Returns `held()` once no thread is on its way out: `/proc` lists a thread for a moment after it was joined.
fn held_at_rest() -> [usize; 3] {
    let deadline = Instant::now() + Duration::from_secs(10);
    let mut last = held();
    loop {
        sleep(Duration::from_millis(100));
        let now = held();
        if now == last || Instant::now() > deadline {
            return now;
        }
        last = now;
    }
}

/// Makes a group of threads, uses it, and tells what is held meanwhile.
fn use_a_group(n: usize) -> [usize; 3] {
    let during = in_good_order(&config(BackendChoice::Tcp), n, |manager| {
        let group = manager.world();
        assert!(group.paths().iter().any(|path| matches!(path, Path::SharedMemory(_))), "it shares memory");
        for call in 0..1000usize {
            let mut x = vec![1.0f32; 1 + call * 37 % 5000];
            group.all_reduce(&mut x, ReduceOp::Sum).expect("it reduces");
            assert!(x.iter().all(|x| *x == n as f32));
        }
        group.barrier().expect("all come");
        let held = held();
        group.barrier().expect("all come");
        held
    });
    during[0]
}

/// The same with two ranks on each of two hosts. Returns the mapped segments.
fn use_two_hosts() -> usize {
    let segments = AtomicUsize::new(0);
    on_hosts(&config(BackendChoice::Tcp), &["a", "b", "a", "b"], |mut manager| {
        let group = manager.world();
        for count in [1usize, 100, 70_000] {
            let mut x = vec![1.0f32; count];
            group.all_reduce(&mut x, ReduceOp::Sum).expect("it reduces");
            assert!(x.iter().all(|x| *x == 4.0));
        }
        segments.fetch_max(held()[2], Relaxed);
        group.barrier().expect("all come");
        manager.finalize().expect("it leaves");
    });
    segments.into_inner()
}

/// Kilobytes of this process that are in memory.
fn resident() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").expect("it is there");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("it has this line");
    line.split_whitespace().next().expect("a number").parse().expect("a number")
}

#[test]
fn a_hundred_thousand_calls_take_no_more_memory_than_ten_thousand() {
    let _alone = ALONE.lock().expect("the other test passes");
    let held = in_good_order(&config(BackendChoice::Tcp), 2, |manager| {
        let group = manager.world();
        let mut seen = Vec::new();
        for call in 0..=100_000usize {
            if [10_000, 100_000].contains(&call) {
                // One rank looks while the other waits: looking takes a descriptor.
                group.barrier().expect("all come");
                if group.rank().0 == 0 {
                    seen.push((held(), resident()));
                }
                group.barrier().expect("all come");
            }
            let mut x = vec![1.0f32; 1 + call * 37 % 700];
            group.all_reduce(&mut x, ReduceOp::Sum).expect("it reduces");
            assert!(x.iter().all(|x| *x == 2.0));
        }
        seen
    });
    let [(before, early), (after, late)] = held[0][..] else { panic!("rank 0 looked twice") };
    assert_eq!(before, after);
    assert!(late.saturating_sub(early) < 512, "{early} KB have become {late} KB");
}

#[test]
fn neither_descriptors_nor_threads_nor_mappings_are_left_and_no_descriptor_is_kept_open() {
    let _alone = ALONE.lock().expect("the other test passes");
    use_a_group(3);
    let before = held_at_rest();
    assert_eq!(before[2], 0);
    for n in [2, 3, 4, 2, 3, 4, 2, 3, 4] {
        let during = use_a_group(n);
        // Each of `n` ranks has mapped its own segment and those of the others, in the groups that it has.
        assert!(during[2] >= n * n && during[2].is_multiple_of(n * n), "{during:?}");
    }
    for _ in 0..3 {
        // Each rank has mapped its own segment and that of the other one on its host.
        assert!(use_two_hosts() >= 8);
    }
    let descriptors = std::fs::read_dir("/proc/self/fd").expect("it is there");
    let names = descriptors.filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok());
    assert!(!names.map(|name| name.display().to_string()).any(|name| name.contains("memfd:")));
    assert_eq!(held_at_rest(), before);
}

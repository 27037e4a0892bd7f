//! Number of threads that arithmetic takes. Alone in its process, as it looks at all threads there are.

use std::time::{Duration, Instant};

use ryzanstein_process_group::DType;
use ryzanstein_tensor_parallel::attention::Rotary;
use ryzanstein_tensor_parallel::compute::{AttentionCall, LayerCache, PAGE_SIZE, SlotMapping};
use ryzanstein_tensor_parallel::{Compute, Host, Tensor};

fn ones(shape: &[usize], dtype: DType) -> Tensor {
    Tensor::new(shape, vec![1.0; shape.iter().product()], dtype).unwrap()
}

/// Everything that is shared among threads where it is large: few rows, many rows in each type, and attention.
fn compute(host: &Host) {
    for (rows, dtype) in [(1, DType::F32), (3, DType::BF16), (200, DType::F32), (200, DType::BF16)] {
        let (x, w) = (ones(&[rows, 512], DType::F32), ones(&[1024, 512], dtype));
        let y = host.linear(&x, &w, None, DType::F32).unwrap();
        assert!(y.values().unwrap().iter().all(|y| *y == 512.0));
    }
    let positions = 128;
    let batch = host
        .batch(&vec![0; positions], &SlotMapping::from_position(0, positions), &Rotary::new(64, 1e4))
        .unwrap();
    let mut cache = LayerCache::new(host, [positions.div_ceil(PAGE_SIZE), 1, 64], DType::F32).unwrap();
    let call =
        AttentionCall { heads: 2, kv_heads: 1, head_dim: 64, batch: &batch, window: None, norms: None };
    let y = host.attention(ones(&[positions, 4 * 64], DType::F32), &call, &mut cache).unwrap();
    assert!(y.values().unwrap().iter().all(|y| (y - 1.0).abs() < 1e-3));
}

/// The threads of this process: which, and their names.
fn threads() -> Vec<(String, String)> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let mut threads: Vec<_> = tasks
        .flatten()
        .map(|task| {
            let name = std::fs::read_to_string(task.path().join("comm")).unwrap_or_default();
            (task.file_name().to_string_lossy().into_owned(), name.trim_end().to_owned())
        })
        .collect();
    threads.sort();
    threads
}

#[test]
fn arithmetic_runs_on_as_many_threads_as_it_was_given_and_no_others() {
    let before = threads();
    let new = || -> Vec<String> {
        let mut names: Vec<_> =
            threads().into_iter().filter(|t| !before.contains(t)).map(|(_, name)| name).collect();
        names.sort();
        names
    };
    compute(&Host::new(1));
    assert_eq!(new(), Vec::<String>::new(), "one thread is the caller's own");
    let three = Host::new(3);
    compute(&three);
    // The caller's thread is one of them.
    let mut wanted = vec!["ryz-compute-1", "ryz-compute-2"];
    settle(&new, &wanted);
    let two = Host::new(2);
    compute(&two);
    wanted.push("ryz-compute-1");
    wanted.sort_unstable();
    settle(&new, &wanted);
}

/// A thread has its name only once it runs, which may be after the others have done all the work.
fn settle(names: &dyn Fn() -> Vec<String>, wanted: &[&str]) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while names() != wanted && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(names(), wanted);
}

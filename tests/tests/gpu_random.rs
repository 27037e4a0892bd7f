//! Random sizes, types, operations and paths on two GPUs for a minute, one process a rank: eager, and from graphs. Ignored:
//! `cargo test -p ryzanstein-tests --test gpu_random -- --ignored` on a machine with two GPUs, NCCL and NVRTC.

mod common;

use std::time::{Duration, Instant};

use common::{nccl, on_gpus};
use half::{bf16, f16};
use ryzanstein_process_group::{Element, Error, ProcessGroup, Rank, ReduceOp};

/// Duration of the calls.
const LENGTH: Duration = Duration::from_secs(60);
/// Most elements of an array.
const MOST: u64 = 3 << 20;

/// The same on all ranks.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        // xorshift64*, by Vigna.
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) % limit
    }

    /// As often short as long.
    fn count(&mut self) -> usize {
        let most = 1 << self.below(22);
        (1 + self.below(most)).min(MOST) as usize
    }
}

/// Small numbers: sums over the ranks are exact in every type.
fn value(rank: usize, i: usize, salt: usize) -> u8 {
    ((i * 7 + rank * 3 + salt) % 11) as u8
}

fn one<T: Element + From<u8>>(group: &mut ProcessGroup, random: &mut Random) -> Result<(), Error> {
    let (n, me, salt) = (group.world_size(), group.rank().index(), random.below(1000) as usize);
    let (operation, count) = (random.below(4), random.count());
    let length = if matches!(operation, 1 | 2) { n * count } else { count };
    let values: Vec<T> = (0..length).map(|i| value(me, i, salt).into()).collect();
    let mut x = group.upload(&values)?;
    match operation {
        0 => group.all_reduce(&mut x, ReduceOp::Sum)?,
        1 => group.all_gather(&mut x)?,
        2 => group.reduce_scatter(&mut x, ReduceOp::Sum)?,
        _ => group.broadcast(&mut x, Rank(1))?,
    }
    let sum = |i: usize| (0..n).map(|rank| value(rank, i, salt)).sum::<u8>();
    let (first, all) = if operation == 2 { (me * count, count) } else { (0, length) };
    for (i, got) in group.download(&x)?.iter().enumerate().skip(first).take(all) {
        let want: T = match operation {
            0 | 2 => sum(i),
            1 => value(i / count, i, salt),
            _ => value(1, i, salt),
        }
        .into();
        assert!(
            bytemuck::bytes_of(got) == bytemuck::bytes_of(&want),
            "operation {operation} of {count} {}: element {i} of rank {me}",
            T::DTYPE
        );
    }
    Ok(())
}

/// Sums of several lengths in a graph, launched several times: each doubles what it sums.
fn from_a_graph(group: &mut ProcessGroup, random: &mut Random) -> Result<(), Error> {
    const CALLS: usize = 6;
    const LAUNCHES: usize = 5;
    let stream = group.device().expect("a GPU").stream().clone();
    let counts: Vec<usize> = (0..CALLS).map(|_| random.count()).collect();
    let mut arrays = Vec::new();
    for count in &counts {
        arrays.push(group.upload(&vec![1.0f32; *count])?);
    }
    let mut graph = None;
    let recorded = group.capture(|group| {
        let mut calls = || arrays.iter_mut().try_for_each(|x| group.all_reduce(x, ReduceOp::Sum));
        #[expect(unsafe_code, reason = "a graph keeps addresses")]
        // SAFETY: arrays and group live until the graph is dropped, at the end.
        let captured = unsafe { stream.capture(&mut calls) };
        graph = Some(captured?);
        Ok::<_, Error>(())
    })?;
    let graph = graph.expect("it was captured");
    for _ in 0..LAUNCHES {
        group.replay::<Error>(&recorded, || Ok(graph.launch(&stream)?))?;
    }
    group.synchronize()?;
    let want = (group.world_size() as f32).powi(LAUNCHES as i32);
    for x in &arrays {
        let wrong = group.download(x)?.iter().position(|got| *got != want);
        assert!(wrong.is_none(), "sums of {counts:?} in a graph: element {wrong:?}");
    }
    Ok(())
}

#[test]
#[ignore = "needs 2 GPUs"]
fn a_minute_of_random_calls_has_every_value() {
    on_gpus("a_minute_of_random_calls_has_every_value", 2, &nccl(), |rank| {
        let group = rank.manager().world();
        let clock = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("a clock");
        let mine = group.rank() == Rank(0);
        let given =
            std::env::var("RYZ_TEST_SEED").ok().map(|seed| seed.parse().expect("RYZ_TEST_SEED is a number"));
        let mine_or_given = given.unwrap_or(clock.as_nanos() as u64 | 1);
        let seed = group.broadcast_object(mine.then_some(&mine_or_given), Rank(0)).unwrap();
        println!("seed {seed}");
        let (mut random, started, mut calls) = (Random(seed), Instant::now(), 0u32);
        // Rank 0 says when it is enough.
        while group.broadcast_object(mine.then_some(&(started.elapsed() < LENGTH)), Rank(0)).unwrap() {
            let path = random.below(3 * group.paths().len() as u64) as usize;
            let path = group.paths().get(path).copied();
            group.force_path(path).unwrap();
            for _ in 0..50 {
                match random.below(3) {
                    0 => one::<f32>(group, &mut random).unwrap(),
                    1 => one::<bf16>(group, &mut random).unwrap(),
                    _ => one::<f16>(group, &mut random).unwrap(),
                }
                calls += 1;
            }
            from_a_graph(group, &mut random).unwrap();
        }
        group.force_path(None).unwrap();
        println!("{calls} calls, and a graph for every 50");
    });
}

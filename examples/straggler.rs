//! Finding a slow and a missing rank with a monitored barrier: `cargo run -p ryzanstein-examples --example straggler`.

use std::sync::Barrier;
use std::thread::sleep;
use std::time::Duration;

use ryzanstein_config::{BackendChoice, Config};
use ryzanstein_process_group::{Error, MemoryRendezvous, ProcessGroupManager, Rank, ReduceOp, Result};

/// The rank that is late.
const STRAGGLER: Rank = Rank(2);

fn rank_main(config: &Config, rendezvous: &MemoryRendezvous, ready: &Barrier) -> Result<()> {
    let mut manager = ProcessGroupManager::initialize(config, rendezvous)?;
    let rank = manager.rank();
    let world = manager.world();
    ready.wait();
    if rank == STRAGGLER {
        // A slow data loader, an overheated GPU, …
        sleep(Duration::from_secs(1));
    }
    let arrivals = world.monitored_barrier(Duration::from_secs(30))?;
    // The latest comes first. An ordinary barrier would only have taken longer.
    println!(
        "rank {rank}: rank {} came last, {:.1} s late",
        arrivals[0].rank,
        arrivals[0].late.as_secs_f64()
    );

    // To the next, it does not come.
    if rank != STRAGGLER {
        match world.monitored_barrier(Duration::from_secs(3)) {
            Err(Error::Timeout { missing, .. }) => println!("rank {rank}: missing: {missing:?}"),
            other => println!("rank {rank}: unexpected: {other:?}"),
        }
    }
    // The barrier does not use the links between ranks, so the group still works.
    let mut x = [rank.0 as f32];
    world.all_reduce(&mut x, ReduceOp::Sum)?;
    println!("rank {rank}: the sum is {}", x[0]);
    manager.finalize()
}

fn main() -> Result<()> {
    let mut config = Config::default();
    config.process_group.backend = BackendChoice::Tcp;
    let ready = Barrier::new(4);
    std::thread::scope(|scope| {
        let (config, ready) = (&config, &ready);
        let ranks = MemoryRendezvous::new(4).into_iter();
        let ranks: Vec<_> = ranks.map(|rank| scope.spawn(move || rank_main(config, &rank, ready))).collect();
        ranks.into_iter().try_for_each(|rank| rank.join().expect("no rank panics"))
    })
}

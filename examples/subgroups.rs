//! Two replicas of a model that is split in two: `cargo run -p ryzanstein-examples --example subgroups`.

use ryzanstein_config::{BackendChoice, Config};
use ryzanstein_process_group::{MemoryRendezvous, ProcessGroupManager, ReduceOp, Result};

fn rank_main(config: &Config, rendezvous: &MemoryRendezvous) -> Result<()> {
    let mut manager = ProcessGroupManager::initialize(config, rendezvous)?;
    let rank = manager.rank();
    let mut x = [rank.0 as f32];
    // Ranks 0 and 1 share a replica, as do 2 and 3.
    manager.tensor_parallel().all_reduce(&mut x, ReduceOp::Sum)?;
    let replica = x[0];
    // Ranks 0 and 2 hold the same shard, as do 1 and 3.
    manager.data_parallel().all_reduce(&mut x, ReduceOp::Avg)?;
    println!("rank {rank}: sum of the replica {replica}, average of the replicas {}", x[0]);
    manager.finalize()
}

fn main() -> Result<()> {
    let mut config = Config::default();
    config.process_group.backend = BackendChoice::Tcp;
    config.layout.tensor_parallel = 2.try_into().ok();
    config.layout.data_parallel = 2.try_into().expect("not zero");
    std::thread::scope(|scope| {
        let config = &config;
        let ranks = MemoryRendezvous::new(4).into_iter();
        let ranks: Vec<_> = ranks.map(|rank| scope.spawn(move || rank_main(config, &rank))).collect();
        ranks.into_iter().try_for_each(|rank| rank.join().expect("no rank panics"))
    })
}

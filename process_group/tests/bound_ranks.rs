//! Ranks that something has bound to CPUs, as `mpirun` and `srun` do.

use std::thread;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use ryzanstein_config::{BackendChoice, Config};
use ryzanstein_process_group::{MemoryRendezvous, ProcessGroupManager, Rank, ReduceOp};

#[test]
fn ranks_know_which_others_share_their_cpus() {
    let allowed = sched_getaffinity(None).unwrap();
    let cpus: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|cpu| allowed.is_set(*cpu)).collect();
    // Ranks 0 and 2 on one CPU, rank 1 on another, unless there is only one.
    let cpu = [0, 1, 0].map(|which| cpus[which % cpus.len()]);
    let expected = if cpus.len() == 1 { [3, 3, 3] } else { [2, 1, 2] };
    let mut config = Config::default();
    config.process_group.backend = BackendChoice::Tcp;
    thread::scope(|scope| {
        for (rank, rendezvous) in MemoryRendezvous::new(3).into_iter().enumerate() {
            let config = &config;
            scope.spawn(move || {
                let mut bound = CpuSet::new();
                bound.set(cpu[rank]);
                sched_setaffinity(None, &bound).unwrap();
                let mut manager = ProcessGroupManager::initialize(config, &rendezvous).unwrap();
                let member = &manager.roster().members[rank];
                assert_eq!((member.cpus.count, &member.cpus.list), (1, &cpu[rank].to_string()));
                assert_eq!(manager.world().sharing_cpus(), expected[rank], "rank {rank}");
                // Only members of the group count.
                if let Some(mut pair) = manager.new_group(&[Rank(0), Rank(1)]).unwrap() {
                    assert_eq!(pair.sharing_cpus(), if cpu[0] == cpu[1] { 2 } else { 1 });
                    pair.barrier().unwrap();
                }
                let mut values = vec![1.0f32; 1000];
                manager.world().all_reduce(&mut values, ReduceOp::Sum).unwrap();
                assert!(values.iter().all(|value| *value == 3.0));
                manager.finalize().unwrap();
            });
        }
    });
}

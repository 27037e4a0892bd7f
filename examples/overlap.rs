//! An all-reduce that overlaps with compute: `cargo run -p ryzanstein-examples --example overlap`.

use ryzanstein_process_group::{ProcessGroup, ReduceOp, Result};

fn rank_main(group: &mut ProcessGroup) -> Result<()> {
    // The group's own thread works on the buffer, which `Work` owns meanwhile.
    let work = group.all_reduce_async(vec![1.0f32; 1 << 20], ReduceOp::Sum)?;
    let squares: u64 = (0..1000).map(|i| i * i).sum();
    let summed = work.wait()?;
    println!("rank {}: squares {squares}, sum {}", group.rank(), summed[0]);
    Ok(())
}

fn main() -> Result<()> {
    std::thread::scope(|scope| {
        let ranks = ProcessGroup::loopback(2).into_iter();
        let ranks: Vec<_> = ranks.map(|mut group| scope.spawn(move || rank_main(&mut group))).collect();
        ranks.into_iter().try_for_each(|rank| rank.join().expect("no rank panics"))
    })
}

//! Ranks as threads of one program: `cargo run -p ryzanstein-examples --example threads`.

use ryzanstein_process_group::{ProcessGroup, ReduceOp, Result};

fn rank_main(group: &mut ProcessGroup) -> Result<()> {
    let mut x = vec![group.rank().0 as f32; 1000];
    group.all_reduce(&mut x, ReduceOp::Sum)?;
    println!("rank {} of {}: the sum is {}", group.rank(), group.world_size(), x[0]);
    Ok(())
}

fn main() -> Result<()> {
    std::thread::scope(|scope| {
        let ranks = ProcessGroup::loopback(4).into_iter();
        let ranks: Vec<_> = ranks.map(|mut group| scope.spawn(move || rank_main(&mut group))).collect();
        ranks.into_iter().try_for_each(|rank| rank.join().expect("no rank panics"))
    })
}

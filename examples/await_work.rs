//! Collectives in async code: `cargo run -p ryzanstein-examples --example await_work`.

use ryzanstein_process_group::{ProcessGroup, ReduceOp, Result};

async fn rank_main(mut group: ProcessGroup) -> Result<()> {
    // The calls of all ranks run on one thread here: a blocking call would wait for ranks that cannot run.
    let work = group.all_reduce_async(vec![1.0f32; 1000], ReduceOp::Sum)?;
    let summed = work.await?;
    println!("rank {}: the sum is {}", group.rank(), summed[0]);
    Ok(())
}

fn main() -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().build()?;
    runtime.block_on(async {
        let mut ranks = tokio::task::JoinSet::new();
        for group in ProcessGroup::loopback(3) {
            ranks.spawn(rank_main(group));
        }
        while let Some(rank) = ranks.join_next().await {
            rank??;
        }
        Ok(())
    })
}

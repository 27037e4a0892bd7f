//! An engine's own tensor as a buffer: `cargo run -p ryzanstein-examples --example own_tensor`.

use ryzanstein_process_group::{Buffer, BufferMut, ProcessGroup, ReduceOp, Result, View, ViewMut};

/// A matrix as some engine has it.
struct Matrix {
    rows: usize,
    columns: usize,
    values: Vec<f32>,
}

impl Buffer for Matrix {
    fn view(&self) -> View<'_> {
        View::of(&self.values)
    }
}

impl BufferMut for Matrix {
    fn view_mut(&mut self) -> ViewMut<'_> {
        ViewMut::of(&mut self.values)
    }
}

fn rank_main(group: &mut ProcessGroup) -> Result<()> {
    let (rows, columns) = (2, 3);
    let mut matrix = Matrix { rows, columns, values: vec![group.rank().0 as f32 + 1.0; rows * columns] };
    group.all_reduce(&mut matrix, ReduceOp::Max)?;
    println!("rank {}: {} x {} of {}", group.rank(), matrix.rows, matrix.columns, matrix.values[0]);
    Ok(())
}

fn main() -> Result<()> {
    std::thread::scope(|scope| {
        let ranks = ProcessGroup::loopback(2).into_iter();
        let ranks: Vec<_> = ranks.map(|mut group| scope.spawn(move || rank_main(&mut group))).collect();
        ranks.into_iter().try_for_each(|rank| rank.join().expect("no rank panics"))
    })
}

//! The layers on a communicator that is not of this repository: a sum under a mutex, between two barriers.

use std::collections::HashMap;
use std::sync::{Barrier, Mutex};

use ryzanstein_process_group::{Buffer, BufferMut, DType, ProcessGroup};
use ryzanstein_tensor_parallel::checkpoint::{Loader, MemorySource};
use ryzanstein_tensor_parallel::embedding::{ParallelLmHead, VocabularyWeight};
use ryzanstein_tensor_parallel::linear::{ColumnOptions, ColumnParallelLinear};
use ryzanstein_tensor_parallel::mlp::ParallelMlp;
use ryzanstein_tensor_parallel::{Communicator, Error, Host, Result, Tensor};

/// State shared by the threads.
struct Ranks {
    size: usize,
    barrier: Barrier,
    values: Mutex<Vec<f32>>,
}

/// One rank. It knows `f32` only.
struct Rank<'a> {
    index: usize,
    all: &'a Ranks,
    gathers: bool,
}

impl Rank<'_> {
    /// Lets every rank add to the shared values, in turn, and returns them.
    fn exchange(&self, length: usize, add: impl FnOnce(&mut [f32])) -> Vec<f32> {
        self.all.values.lock().unwrap().resize(length, 0.0);
        self.all.barrier.wait();
        add(&mut self.all.values.lock().unwrap());
        self.all.barrier.wait();
        let result = self.all.values.lock().unwrap().clone();
        self.all.barrier.wait();
        self.all.values.lock().unwrap().clear();
        self.all.barrier.wait();
        result
    }
}

impl Communicator for Rank<'_> {
    fn world_size(&self) -> usize {
        self.all.size
    }

    fn all_reduce_sum(&mut self, values: &mut dyn BufferMut) -> Result<()> {
        let mut view = values.view_mut();
        let values = view.elements_mut::<f32>()?;
        let sum = self.exchange(values.len(), |shared| {
            shared.iter_mut().zip(&*values).for_each(|(shared, mine)| *shared += mine);
        });
        values.copy_from_slice(&sum);
        Ok(())
    }

    fn all_gather(&mut self, mine: &dyn Buffer, all: &mut dyn BufferMut) -> Result<()> {
        if !self.gathers {
            return Err(Error::communicator("the cable is out"));
        }
        let (mine, mut all) = (mine.view().elements::<f32>()?, all.view_mut());
        let start = self.index * mine.len();
        let gathered = self.exchange(all.count(), |shared| {
            shared[start..start + mine.len()].copy_from_slice(mine);
        });
        all.elements_mut::<f32>()?.copy_from_slice(&gathered);
        Ok(())
    }
}

/// Small integers, whose sums are exact in any order.
fn whole(shape: &[usize], seed: usize) -> Tensor {
    let values = (0..shape.iter().product()).map(|i| ((i * 7 + seed * 13 + i / 5) % 5) as f32 - 2.0);
    Tensor::new(shape, values.collect(), DType::F32).unwrap()
}

fn weights() -> HashMap<String, Tensor> {
    let shapes: [(&str, &[usize]); 5] = [
        ("m.gate_proj.weight", &[12, 6]),
        ("m.up_proj.weight", &[12, 6]),
        ("m.down_proj.weight", &[6, 12]),
        ("c.weight", &[12, 6]),
        ("h.weight", &[10, 12]),
    ];
    shapes.iter().enumerate().map(|(i, (name, shape))| ((*name).to_owned(), whole(shape, i))).collect()
}

/// An MLP, a column-parallel layer that gathers, and a head.
fn layers(rank: usize, world_size: usize, ranks: &mut dyn Communicator) -> Result<Vec<f32>> {
    let (weights, host) = (weights(), Host::new(1));
    let mut source = MemorySource { tensors: &weights };
    let mut loader = Loader::new(&mut source, rank, world_size, DType::F32)?;
    let mlp = ParallelMlp::load(&mut loader, "m", 6, 12, false)?;
    let gathered = ColumnOptions { gather_output: true, ..ColumnOptions::default() };
    let column = ColumnParallelLinear::load(&mut loader, "c", (12, 6), gathered)?;
    let head = ParallelLmHead::new(VocabularyWeight::load(&mut loader, "h", 10, 12)?);
    let x = mlp.forward(&whole(&[3, 6], 9), &host, ranks)?;
    let x = column.forward(&x, &host, ranks)?;
    Ok(head.forward(&x, &host, ranks)?.values()?.into_owned())
}

fn on_threads(size: usize, gathers: bool) -> Vec<Result<Vec<f32>>> {
    let all = Ranks { size, barrier: Barrier::new(size), values: Mutex::default() };
    std::thread::scope(|scope| {
        let run = |index| {
            let all = &all;
            scope.spawn(move || layers(index, size, &mut Rank { index, all, gathers }))
        };
        let ranks: Vec<_> = (0..size).map(run).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

#[test]
fn layers_on_an_engines_communicator_compute_what_they_compute_on_a_group() {
    let alone = layers(0, 1, &mut ProcessGroup::loopback(1).remove(0)).unwrap();
    assert!(alone.iter().any(|value| *value != 0.0));
    for size in 1..=4 {
        for (rank, got) in on_threads(size, true).into_iter().enumerate() {
            let got = got.unwrap();
            let near = got.iter().zip(&alone).all(|(a, b)| (a - b).abs() <= 1e-4 * b.abs().max(1.0));
            assert!(got.len() == alone.len() && near, "rank {rank} of {size}: {got:?}, not {alone:?}");
        }
    }
}

#[test]
fn an_error_of_an_engines_communicator_comes_out_of_the_layer() {
    for outcome in on_threads(2, false) {
        assert_eq!(outcome.unwrap_err().to_string(), "communicator: the cable is out");
    }
}

#[test]
fn a_communicator_without_an_all_gather_says_what_to_implement() {
    struct Alone;
    impl Communicator for Alone {
        fn world_size(&self) -> usize {
            1
        }

        fn all_reduce_sum(&mut self, _: &mut dyn BufferMut) -> Result<()> {
            Ok(())
        }
    }
    let error = layers(0, 1, &mut Alone).unwrap_err();
    assert!(matches!(error, Error::Communicator(_)), "{error}");
    assert!(error.to_string().contains("implement `Communicator::all_gather`"), "{error}");
}

#[test]
fn elements_of_another_type_are_refused() {
    let mut tensor = Tensor::zeros(&[2, 2], DType::BF16).unwrap();
    let error = tensor.view_mut().elements_mut::<f32>().unwrap_err();
    assert!(error.to_string().contains("elements of bf16 and is read as f32"), "{error}");
    assert!(error.is_recoverable());
}

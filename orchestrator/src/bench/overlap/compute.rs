//! The compute of a synthetic backward pass.

use std::hint::black_box;
use std::time::{Duration, Instant};

use ryzanstein_process_group::device::Device;
use ryzanstein_process_group::{DType, ProcessGroup};
use ryzanstein_tensor_parallel::checkpoint::{NoiseSource, ShardedTensor, Sharding, WeightSource as _};
use ryzanstein_tensor_parallel::{Compute as _, Cuda, Error, Tensor};
use serde::Serialize;

use super::median_us;

/// Units whose time is measured to learn that of one.
const TRIAL: u32 = 1000;
/// Rounds of a unit on a processor.
const ROUNDS: u32 = 1000;
/// Rows and columns of the matrices whose product is a unit on a GPU.
const SIDE: usize = 1024;

/// What computes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// The processors of the host, which a reduction on host memory needs too; or the GPU, by products of matrices.
    Busy,
    /// Nothing: the host only waits, like one whose accelerator computes.
    Idle,
}

/// The compute of one parameter.
#[derive(Default)]
pub(super) struct Compute {
    work: Work,
    units: u32,
}

#[derive(Default)]
enum Work {
    #[default]
    Nothing,
    /// A unit is a microsecond.
    Wait,
    Processor,
    /// Boxed: the others are small.
    Gpu(Box<Products>),
}

struct Products {
    cuda: Cuda,
    x: Tensor,
    weight: Tensor,
}

impl Compute {
    /// So much compute as takes `us` microseconds when all ranks compute at once. Every rank calls this.
    pub(super) fn calibrated(kind: Kind, us: f64, group: &mut ProcessGroup) -> Result<Self, Error> {
        let work = match (kind, group.device()) {
            (Kind::Idle, Some(_)) => {
                return Err(Error::Input(
                    "--compute idle waits on the host, and here GPUs compute; leave it out, or pass --backend tcp".into(),
                ));
            }
            (Kind::Idle, None) => return Ok(Self { work: Work::Wait, units: us as u32 }),
            (Kind::Busy, None) => Work::Processor,
            (Kind::Busy, Some(device)) => Work::Gpu(Box::new(Products::new(device)?)),
        };
        let trial = Self { work, units: TRIAL };
        let mut seconds = Vec::new();
        for _ in 0..6 {
            group.barrier()?;
            group.synchronize()?;
            let started = Instant::now();
            trial.run()?;
            group.synchronize()?;
            seconds.push(started.elapsed().as_secs_f64());
        }
        let unit_us = median_us(group, &seconds)? / f64::from(TRIAL);
        Ok(Self { units: (us / unit_us).round() as u32, ..trial })
    }

    /// Computes, or on a GPU enqueues it on the compute stream.
    pub(super) fn run(&self) -> Result<(), Error> {
        match &self.work {
            Work::Nothing => {}
            Work::Wait => std::thread::sleep(Duration::from_micros(self.units.into())),
            Work::Processor => rounds(u64::from(self.units) * u64::from(ROUNDS)),
            Work::Gpu(products) => {
                for _ in 0..self.units {
                    products.cuda.linear(&products.x, &products.weight, None, DType::BF16)?;
                }
            }
        }
        Ok(())
    }
}

impl Products {
    fn new(device: &Device) -> Result<Self, Error> {
        let cuda = Cuda::new(device, 1)?;
        let matrix = |name| {
            let shape = [SIDE; 2];
            let mut noise = cuda.zeros(&shape, DType::BF16)?;
            let whole = ShardedTensor { name, shape: &shape, sharding: Sharding::Replicated };
            NoiseSource { rank: 0 }.fill(&whole, &mut noise, 0)?;
            Ok::<_, Error>(noise)
        };
        let (x, weight) = (matrix("x")?, matrix("weight")?);
        Ok(Self { cuda, x, weight })
    }
}

/// Work for a processor that touches no memory.
fn rounds(count: u64) {
    black_box((0..count).fold(1.0f32, |x, _| black_box(x) * 0.999 + 0.001));
}

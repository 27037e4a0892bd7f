//! The compute of a synthetic backward pass.

use std::time::{Duration, Instant};

use ryzanstein_process_group::device::Device;
use ryzanstein_process_group::{DType, ProcessGroup};
use ryzanstein_tensor_parallel::checkpoint::{NoiseSource, TensorSlice, WeightSource as _};
use ryzanstein_tensor_parallel::{Compute as _, Cuda, Error, Tensor};

use super::median_us;

/// Number of units whose time is measured to determine that of one.
const TRIAL: u32 = 1000;
/// Rows and columns of the matrices whose product is a unit on a GPU.
const SIDE: usize = 1024;

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
    /// Waits; a unit is a microsecond.
    Wait,
    /// Multiplies matrices. Boxed: the others are small.
    Gpu(Box<Products>),
}

struct Products {
    cuda: Cuda,
    x: Tensor,
    weight: Tensor,
}

impl Compute {
    /// Calibrates compute that takes `us` microseconds when all ranks compute at once. Every rank calls this.
    pub(super) fn calibrated(us: f64, group: &mut ProcessGroup) -> Result<Self, Error> {
        let Some(device) = group.device() else { return Ok(Self { work: Work::Wait, units: us as u32 }) };
        let trial = Self { work: Work::Gpu(Box::new(Products::new(device)?)), units: TRIAL };
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

    /// Computes, or on a GPU enqueues the compute on the compute stream.
    pub(super) fn run(&self) -> Result<(), Error> {
        match &self.work {
            Work::Nothing => {}
            Work::Wait => std::thread::sleep(Duration::from_micros(self.units.into())),
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
            NoiseSource.fill(&TensorSlice::whole(name, &shape), &mut noise, 0)?;
            Ok::<_, Error>(noise)
        };
        let (x, weight) = (matrix("x")?, matrix("weight")?);
        Ok(Self { cuda, x, weight })
    }
}

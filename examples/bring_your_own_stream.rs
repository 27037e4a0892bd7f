//! An engine that brings its own memory, and on GPUs its own stream: `cargo run -p ryzanstein-examples --example
//! bring_your_own_stream` sums tensors of candle over two ranks on processors; with `--gpu`, slices of cudarc over as many
//! ranks as there are GPUs, on the streams of the engine, and once more in a graph that the engine captures.

use std::cell::RefCell;
use std::sync::Arc;

use anyhow::{Result, ensure};
use candle_core::{CpuStorage, InplaceOp1, Layout, Tensor};
use ryzanstein_config::{BackendChoice, Config, DeviceConfig};
use ryzanstein_process_group::device::cudarc::driver::{CudaContext, sys};
use ryzanstein_process_group::device::{Device, Libraries, LibrarySearch};
use ryzanstein_process_group::{MemoryRendezvous, ProcessGroup, ProcessGroupManager, ReduceOp};

/// A sum over all ranks, as an operation of candle on a tensor's own storage.
struct AllReduce<'a>(RefCell<&'a mut ProcessGroup>);

impl InplaceOp1 for AllReduce<'_> {
    fn name(&self) -> &'static str {
        "all-reduce"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> candle_core::Result<()> {
        let Some((start, end)) = layout.contiguous_offsets() else {
            candle_core::bail!("an all-reduce needs a contiguous tensor")
        };
        let group = &mut **self.0.borrow_mut();
        let summed = match storage {
            CpuStorage::F32(values) => group.all_reduce(&mut values[start..end], ReduceOp::Sum),
            CpuStorage::BF16(values) => group.all_reduce(&mut values[start..end], ReduceOp::Sum),
            _ => candle_core::bail!("an all-reduce of another type than f32 and bf16"),
        };
        summed.map_err(candle_core::Error::wrap)
    }
}

/// One rank on a processor.
fn on_processor(group: &mut ProcessGroup) -> Result<()> {
    let rank = group.rank().0 as f32;
    let x = Tensor::full(rank + 1.0, (2, 3), &candle_core::Device::Cpu)?;
    x.inplace_op1(&AllReduce(RefCell::new(group)))?;
    ensure!(x.to_vec2::<f32>()? == vec![vec![3.0; 3]; 2]);
    println!("rank {rank} on a processor: {x}");
    Ok(())
}

/// One rank on a GPU.
fn on_gpu(
    rendezvous: &MemoryRendezvous,
    rank: usize,
    ranks: usize,
    libraries: &Arc<Libraries>,
) -> Result<()> {
    let context = CudaContext::new(rank)?;
    // SAFETY: every slice below is used on one stream. Without it cudarc's events would be waited for in the capture.
    #[expect(unsafe_code, reason = "the engine says that it keeps to one stream")]
    unsafe {
        context.disable_event_tracking();
    }
    let stream = context.new_stream()?;
    let device = Device::from_cudarc(&context, &stream, libraries, &DeviceConfig::default())?;
    let mut config = Config::default();
    config.process_group.backend = BackendChoice::Nccl;
    let mut manager = ProcessGroupManager::initialize_on(&config, rendezvous, &device)?;
    let group = manager.world();

    let mut x = stream.clone_htod(&vec![rank as f32 + 1.0; 1000])?;
    group.all_reduce(&mut x, ReduceOp::Sum)?;
    let sum = (ranks * (ranks + 1) / 2) as f32;
    ensure!(stream.clone_dtoh(&x)? == vec![sum; 1000]);

    // The engine's own capture, which the group counts.
    let mut graph = None;
    let recorded = group.capture(|group| -> Result<()> {
        stream.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED)?;
        let enqueued = group.all_reduce(&mut x, ReduceOp::Sum);
        // Whatever became of the call, the capture ends.
        graph = stream.end_capture(sys::CUgraphInstantiate_flags_enum(0))?;
        Ok(enqueued?)
    })?;
    let Some(graph) = graph else { anyhow::bail!("nothing was captured") };
    for _ in 0..2 {
        group.replay(&recorded, || -> Result<()> { Ok(graph.launch()?) })?;
    }
    let again = sum * (ranks * ranks) as f32;
    ensure!(stream.clone_dtoh(&x)? == vec![again; 1000]);
    println!("rank {rank} on GPU {rank}: {sum}, and {again} after a graph that was launched twice");
    drop(graph);
    manager.finalize()?;
    Ok(())
}

fn main() -> Result<()> {
    if !std::env::args().any(|argument| argument == "--gpu") {
        return std::thread::scope(|scope| {
            let ranks: Vec<_> = ProcessGroup::loopback(2)
                .into_iter()
                .map(|mut group| scope.spawn(move || on_processor(&mut group)))
                .collect();
            ranks.into_iter().try_for_each(|rank| rank.join().expect("a rank panics"))
        });
    }
    let search = LibrarySearch::from_variables(|name| std::env::var(name).ok());
    let libraries = Arc::new(Libraries::find(&DeviceConfig::default(), &search));
    let gpus = libraries.device_count()? as usize;
    ensure!(gpus > 0, "CUDA shows no GPU");
    std::thread::scope(|scope| {
        let libraries = &libraries;
        let ranks: Vec<_> = MemoryRendezvous::new(gpus)
            .into_iter()
            .enumerate()
            .map(|(rank, handle)| scope.spawn(move || on_gpu(&handle, rank, gpus, libraries)))
            .collect();
        ranks.into_iter().try_for_each(|rank| rank.join().expect("a rank panics"))
    })
}

//! Engines that bring their own context, stream and slices. All ignored: `cargo test -p ryzanstein-tests --test gpu_engine --
//! --ignored --test-threads=1` on a machine with GPUs, NCCL and NVRTC.

#![expect(unsafe_code, reason = "raw handles, and an engine that orders its slices by itself")]

use std::sync::Arc;

use ryzanstein_config::{BackendChoice, DeviceConfig};
use ryzanstein_process_group::device::cudarc::driver::{CudaContext, CudaStream, sys};
use ryzanstein_process_group::device::{Device, DeviceBuffer};
use ryzanstein_process_group::{Error, MemoryRendezvous, ProcessGroup, ProcessGroupManager, ReduceOp};
use ryzanstein_tests::config;
use ryzanstein_tests::gpu::{libraries, need};

const COUNT: usize = 1 << 22;

fn adopt(stream: &Arc<CudaStream>) -> Device {
    Device::from_cudarc(stream.context(), stream, &libraries(), &DeviceConfig::default()).unwrap()
}

/// Two ranks, threads with a GPU each, whose engine has made a stream of its own.
fn engines(tracking: bool, rank: impl Fn(&mut ProcessGroup, &Arc<CudaStream>) + Sync) {
    need(2);
    let rank = &rank;
    std::thread::scope(|scope| {
        for (ordinal, rendezvous) in MemoryRendezvous::new(2).into_iter().enumerate() {
            scope.spawn(move || {
                let context = CudaContext::new(ordinal).unwrap();
                if !tracking {
                    // SAFETY: tests without tracking use one stream.
                    unsafe { context.disable_event_tracking() };
                }
                let stream = context.new_stream().unwrap();
                let device = adopt(&stream);
                let config = config(BackendChoice::Nccl);
                let mut manager = ProcessGroupManager::initialize_on(&config, &rendezvous, &device).unwrap();
                rank(manager.world(), &stream);
                manager.finalize().unwrap();
            });
        }
    });
}

#[test]
#[ignore = "needs 2 GPUs"]
fn a_slice_is_reduced_on_the_engines_stream() {
    engines(true, |group, stream| {
        assert_eq!(group.device().unwrap().stream().handle(), stream.cu_stream());
        let mine = group.rank().0 as f32 + 1.0;
        let mut x = stream.clone_htod(&vec![mine; COUNT]).unwrap();
        group.all_reduce(&mut x, ReduceOp::Sum).unwrap();
        assert_eq!(stream.clone_dtoh(&x).unwrap(), vec![3.0; COUNT]);
        // Some of it, and from one slice into another.
        group.all_reduce(&mut x.slice_mut(0..10), ReduceOp::Sum).unwrap();
        let mut out = stream.alloc_zeros::<f32>(COUNT).unwrap();
        group.all_reduce_into(&x, &mut out, ReduceOp::Sum).unwrap();
        assert_eq!(stream.clone_dtoh(&out).unwrap(), [vec![12.0; 10], vec![6.0; COUNT - 10]].concat());
    });
}

#[test]
#[ignore = "needs 2 GPUs"]
fn a_slice_of_another_stream_is_waited_for_and_waits() {
    engines(true, |group, stream| {
        let other = stream.context().new_stream().unwrap();
        let mine = group.rank().0 as f32 + 1.0;
        for round in 0..20 {
            let mut x = other.alloc_zeros::<f32>(COUNT).unwrap();
            // On the other stream: long enough that a call that does not wait finds zeros.
            for _ in 0..10 {
                other.memcpy_htod(&vec![mine; COUNT], &mut x).unwrap();
            }
            group.all_reduce(&mut x, ReduceOp::Sum).unwrap();
            assert_eq!(other.clone_dtoh(&x).unwrap(), vec![3.0; COUNT], "round {round}");
            let work = group.all_reduce_async(x, ReduceOp::Sum).unwrap();
            let x = work.join().unwrap();
            assert_eq!(other.clone_dtoh(&x).unwrap(), vec![6.0; COUNT], "round {round}, beside");
        }
    });
}

#[test]
#[ignore = "needs 2 GPUs"]
fn a_call_goes_into_the_engines_own_capture() {
    engines(false, |group, stream| {
        let mut x = stream.clone_htod(&vec![1.0f32; COUNT]).unwrap();
        group.all_reduce(&mut x, ReduceOp::Sum).unwrap();
        let mut graph = None;
        let recorded = group
            .capture(|group| {
                stream.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED).unwrap();
                let outcome = group.all_reduce(&mut x, ReduceOp::Sum);
                graph = stream.end_capture(sys::CUgraphInstantiate_flags_enum(0)).unwrap();
                outcome
            })
            .unwrap();
        let graph = graph.expect("something was captured");
        assert_eq!(stream.clone_dtoh(&x).unwrap(), vec![2.0; COUNT], "captured, not done");
        for round in 1..4 {
            group
                .replay::<Error>(&recorded, || {
                    graph.launch().unwrap();
                    Ok(())
                })
                .unwrap();
            assert_eq!(stream.clone_dtoh(&x).unwrap(), vec![2.0f32.powi(round + 1); COUNT]);
        }
        group.synchronize().unwrap();
    });
}

#[test]
#[ignore = "needs 2 GPUs"]
fn a_tracked_slice_is_refused_in_a_capture_and_the_group_goes_on() {
    engines(true, |group, stream| {
        let mut x = stream.clone_htod(&vec![1.0f32; 100]).unwrap();
        stream.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED).unwrap();
        let error = group.all_reduce(&mut x, ReduceOp::Sum).unwrap_err();
        stream.end_capture(sys::CUgraphInstantiate_flags_enum(0)).unwrap();
        assert!(error.to_string().contains("disable_event_tracking"), "{error}");
        group.all_reduce(&mut x, ReduceOp::Sum).unwrap();
        assert_eq!(stream.clone_dtoh(&x).unwrap(), [2.0; 100]);
    });
}

#[test]
#[ignore = "needs 1 GPU"]
fn a_device_of_raw_handles_leaves_them_to_their_owner() {
    need(1);
    let context = CudaContext::new(0).unwrap();
    let stream = context.new_stream().unwrap();
    for handle in [stream.cu_stream(), std::ptr::null_mut()] {
        // SAFETY: context and stream outlive the device, and libraries find the driver that cudarc has loaded.
        let device = unsafe {
            Device::from_raw(
                0,
                context.cu_ctx().cast(),
                handle.cast(),
                &libraries(),
                &DeviceConfig::default(),
            )
        }
        .unwrap();
        let x = DeviceBuffer::from_slice(&device, &[1.0f32; 1000]).unwrap();
        assert_eq!(x.to_vec::<f32>(device.stream()).unwrap(), [1.0; 1000]);
        let mut slice = stream.clone_htod(&[1.0f32; 10]).unwrap();
        let error = ProcessGroup::loopback(1)[0].all_reduce(&mut slice, ReduceOp::Sum).unwrap_err();
        assert!(error.to_string().contains("the buffer is in the memory of GPU 0"), "{error}");
    }
    // Both are alive still.
    let x = stream.clone_htod(&[2.0f32; 10]).unwrap();
    assert_eq!(stream.clone_dtoh(&x).unwrap(), [2.0; 10]);
    context.synchronize().unwrap();
}

#[test]
#[ignore = "needs 1 GPU"]
fn a_stream_of_another_context_object_is_refused() {
    need(1);
    let (one, stream) = (CudaContext::new(0).unwrap(), CudaContext::new(0).unwrap().new_stream().unwrap());
    let foreign = Device::from_cudarc(&one, &stream, &libraries(), &DeviceConfig::default());
    assert!(foreign.is_err(), "its slices would not be ordered with the stream");
}

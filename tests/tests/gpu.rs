//! NCCL, one process a rank and one GPU a process. All ignored: `cargo test -p ryzanstein-tests --test gpu -- --ignored
//! --test-threads=1` on a machine with GPUs, NCCL and NVRTC.

mod common;

use std::sync::Arc;

use common::{PATIENCE, initialize, nccl, on_gpus, sum_of_ranks};
use ryzanstein_config::{BackendChoice, DeviceConfig};
use ryzanstein_process_group::device::{Device, DeviceBuffer, Launch, Libraries, LibrarySearch, cudarc};
use ryzanstein_process_group::paths::{Path, PeerAlgorithm};
use ryzanstein_process_group::{
    BackendKind, BucketOptions, BucketedReducer, Buffer, BufferMut, DType, Element, Error, LocalRank,
    Operation, Parameter, Rank, ReduceOp, WireType,
};
use ryzanstein_tensor_parallel::{Compute as _, Cuda, Tensor};
use ryzanstein_tests::gpu::{Ranks, gpus, need, role, some_gpus};
use ryzanstein_tests::{config, conformance};

fn suite(name: &str, n: usize) {
    on_gpus(name, n, &nccl(), |rank| conformance::run(rank.manager().world()));
}

#[test]
#[ignore = "needs 1 GPU"]
fn one_gpu_conforms() {
    suite("one_gpu_conforms", 1);
}

#[test]
#[ignore = "needs 2 GPUs"]
fn two_gpus_conform() {
    suite("two_gpus_conform", 2);
}

#[test]
#[ignore = "needs 3 GPUs"]
fn three_gpus_conform() {
    suite("three_gpus_conform", 3);
}

#[test]
#[ignore = "needs 4 GPUs"]
fn four_gpus_conform() {
    suite("four_gpus_conform", 4);
}

#[test]
#[ignore = "needs 2 GPUs"]
fn reductions_mean_what_is_documented() {
    on_gpus("reductions_mean_what_is_documented", 2, &nccl(), |rank| {
        let group = rank.manager().world();
        let me = group.rank().0;
        let mut reduce = |values: &[f32], op| {
            let mut x = group.upload(values).unwrap();
            group.all_reduce(&mut x, op).unwrap();
            group.download(&x).unwrap()
        };
        // A NaN on one rank wins, wherever it is; zeros have an order; infinities are numbers.
        let mine = if me == 0 { [f32::NAN, 1.0, -1.0, f32::INFINITY] } else { [1.0, f32::NAN, -2.0, -5.0] };
        for op in [ReduceOp::Min, ReduceOp::Max] {
            let got = reduce(&mine, op);
            assert!(got[0].is_nan() && got[1].is_nan(), "{op}: {got:?}");
        }
        assert_eq!(reduce(&mine, ReduceOp::Min)[2..], [-2.0, -5.0]);
        assert_eq!(reduce(&mine, ReduceOp::Max)[2..], [-1.0, f32::INFINITY]);
        // Integers wrap; their mean goes towards zero.
        let mut x = group.upload(&[100i8, -128, 3, -3]).unwrap();
        let mut y = group.upload(&[if me == 0 { -4i8 } else { 1 }, 127]).unwrap();
        group.all_reduce(&mut x, ReduceOp::Sum).unwrap();
        group.all_reduce(&mut y, ReduceOp::Avg).unwrap();
        assert_eq!(group.download(&x).unwrap(), [-56, 0, 6, -6]);
        assert_eq!(group.download(&y).unwrap(), [-1, -1]);
    });
}

/// Invariant numerics need the same bits from both. The longest array takes several launches.
#[test]
#[ignore = "needs 2 GPUs"]
fn the_sum_of_f32_terms_with_the_norm_has_the_bits_of_separate_steps() {
    on_gpus("the_sum_of_f32_terms_with_the_norm_has_the_bits_of_separate_steps", 2, &nccl(), |rank| {
        let group = rank.manager().world();
        let compute = Cuda::new(group.device().unwrap(), 1).unwrap();
        let value =
            |salt: u32, i: usize| ((i as u32 + salt).wrapping_mul(2_654_435_761) >> 8) as f32 / 4e6 - 2.0;
        let mine = 77 * group.rank().0;
        let upload = |shape: &[usize], values: Vec<f32>, dtype| {
            compute.upload(Tensor::new(shape, values, dtype).unwrap()).unwrap()
        };
        let bits = |tensor: &Tensor| tensor.values().unwrap().iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            for shape @ [rows, columns] in [[1, 4096], [5, 5120], [300, 8192], [3000, 4096]] {
                let make = |salt| (0..rows * columns).map(|i| value(salt, i)).collect::<Vec<f32>>();
                let weight = upload(&[columns], (0..columns).map(|i| value(5, i)).collect(), DType::F32);
                let mut terms = upload(&shape, make(mine), DType::F32);
                let [mut together, mut apart] = [(); 2].map(|()| upload(&shape, make(9), dtype));
                let mut got = upload(&shape, vec![f32::NAN; rows * columns], dtype);
                assert!(group.fuses_add_norm(DType::F32, rows, columns), "{shape:?}");
                group.all_reduce_add_norm(&terms, &mut together, (&weight, 1e-5), &mut got).unwrap();
                group.all_reduce(&mut terms, ReduceOp::Sum).unwrap();
                let sum = upload(&shape, terms.values().unwrap().into_owned(), dtype);
                let want = compute.add_norm(&mut apart, &sum, &weight, 1e-5).unwrap();
                assert!(bits(&together) == bits(&apart), "{shape:?} of {dtype}: the residual");
                assert!(bits(&got) == bits(&want), "{shape:?} of {dtype}");
            }
        }
    });
}

#[test]
#[ignore = "needs 2 GPUs"]
fn a_captured_sequence_gives_the_same_values_each_time_it_is_replayed() {
    on_gpus("a_captured_sequence_gives_the_same_values_each_time_it_is_replayed", 2, &nccl(), |rank| {
        let mut other = rank.manager().new_group(&[Rank(0), Rank(1)]).unwrap().unwrap();
        let group = rank.manager().world();
        let device: Device = group.device().unwrap().clone();
        let me = group.rank().0;
        let length = 10_007;
        let values: Vec<f32> = (0..length).map(|i| (i % 13 + me as usize) as f32).collect();
        let mut x = DeviceBuffer::from_slice(&device, &values).unwrap();
        let mut all = DeviceBuffer::new(&device, DType::F32, 2 * length).unwrap();
        // Once outside: connections and scratch memory are made then.
        group.all_reduce(&mut x, ReduceOp::Max).unwrap();
        group.all_gather_into(&x, &mut all).unwrap();
        group.synchronize().unwrap();
        group.set_graph_timing(true);
        let mut graph = None;
        let recorded = group
            .capture(|group| {
                #[expect(unsafe_code, reason = "a graph keeps addresses")]
                // SAFETY: buffers and group live until the graph is dropped, below.
                let captured = unsafe {
                    device.stream().capture(|| {
                        group.all_reduce(&mut x, ReduceOp::Sum)?;
                        group.all_reduce(&mut x, ReduceOp::Max)?;
                        group.all_gather_into(&x, &mut all)
                    })
                };
                graph = Some(captured?);
                Ok::<_, Error>(())
            })
            .unwrap();
        let graph = graph.unwrap();
        assert!(graph.nodes() >= 3, "{graph:?}");
        let mut larger = DeviceBuffer::new(&device, DType::F32, 64 * length).unwrap();
        let refused = other.replay::<Error>(&recorded, || panic!("launched")).unwrap_err();
        assert!(refused.to_string().contains("another group captured"), "{refused}");
        group.profile().clear();
        for _ in 0..3 {
            x.write(device.stream(), &values).unwrap();
            // Larger ones of the kind that needs scratch memory leave alone what the graph uses.
            group.all_reduce(&mut larger, ReduceOp::Max).unwrap();
            group.replay::<Error>(&recorded, || Ok(graph.launch(device.stream())?)).unwrap();
            group.synchronize().unwrap();
            let got: Vec<f32> = all.to_vec(device.stream()).unwrap();
            for (i, value) in got.iter().enumerate() {
                assert_eq!(*value, (2 * (i % length % 13) + 1) as f32, "element {i}");
            }
        }
        // Launched one behind the other, each overtakes the last on the host.
        for _ in 0..300 {
            group.replay::<Error>(&recorded, || Ok(graph.launch(device.stream())?)).unwrap();
        }
        group.synchronize().unwrap();
        // Calls in the graph are counted and timed like direct ones.
        let rows = group.profile().rows();
        let row = |op, reduction| {
            rows.iter()
                .find(|r| r.op == op && r.reduction == reduction && r.bytes_up_to == 1 << 16)
                .expect("a row")
        };
        for row in [row("all_reduce", Some("sum")), row("all_reduce", Some("max"))] {
            assert!(row.calls == 303 && row.timed >= 3, "{row:?}");
            assert!(row.median_us > 1.0, "{row:?}");
        }
        drop(graph);
    });
}

#[test]
#[ignore = "needs 2 GPUs"]
fn gradients_are_reduced_in_buckets_behind_what_writes_them() {
    on_gpus("gradients_are_reduced_in_buckets_behind_what_writes_them", 2, &nccl(), |rank| {
        let group = rank.manager().world();
        let (me, other) = (group.rank(), Rank(1 - group.rank().0));
        let counts = [7, 100_000, 3, 50_000];
        let model: Vec<Parameter> = counts
            .iter()
            .zip(["a", "b", "c", "d"])
            .map(|(n, name)| Parameter::new::<f32>(name, *n))
            .collect();
        let options = BucketOptions {
            bucket_bytes: 210_000,
            op: ReduceOp::Sum,
            find_unused: true,
            ..BucketOptions::default()
        };
        let mut reducer = BucketedReducer::new(group, &model, &options).unwrap();
        let buckets: Vec<_> = reducer.buckets().iter().map(|bucket| bucket.parameters.clone()).collect();
        assert_eq!(buckets, [vec![3, 2], vec![1], vec![0]]);
        for step in 0..3 {
            // The message for `b` is written while the first bucket is reduced.
            for parameter in [3, 2, 1] {
                let value = (step + me.index() + 3 * parameter) as f32;
                let values = group.upload(&vec![value; counts[parameter]]).unwrap();
                let mut gradient = reducer.device_gradient(parameter).unwrap();
                group.send_recv(&values, other, &mut gradient, other).unwrap();
                reducer.mark_ready(group, parameter).unwrap();
            }
            assert_eq!(reducer.finish(group).unwrap(), ["a"]);
            for (parameter, count) in counts.into_iter().enumerate() {
                let mut all = group.upload(&vec![-1.0f32; 2 * count]).unwrap();
                group.all_gather_into(&reducer.device_gradient(parameter).unwrap(), &mut all).unwrap();
                let want = if parameter == 0 { 0.0 } else { (2 * step + 1 + 6 * parameter) as f32 };
                assert_eq!(group.download(&all).unwrap(), vec![want; 2 * count], "parameter {parameter}");
            }
        }
        let error = reducer.gradient::<f32>(0).unwrap_err();
        assert!(error.to_string().contains("device_gradient"), "{error}");
    });
}

#[test]
#[ignore = "needs 2 GPUs"]
fn values_are_sent_in_16_bits_within_the_documented_error() {
    on_gpus("values_are_sent_in_16_bits_within_the_documented_error", 2, &nccl(), |rank| {
        let group = rank.manager().world();
        let (me, n) = (group.rank().0 as usize, group.world_size());
        let operand = |rank: usize, i: usize| ((i * 7919 + rank * 104_729) % 20_011) as f32 * 0.001 - 10.0;
        for (wire, length) in [WireType::Bf16, WireType::F16].into_iter().flat_map(|w| [(w, 1), (w, 100_003)])
        {
            for op in [ReduceOp::Sum, ReduceOp::Avg] {
                let mine: Vec<f32> = (0..length).map(|i| operand(me, i)).collect();
                let mut x = group.upload(&mine).unwrap();
                group.all_reduce_compressed(&mut x, op, wire).unwrap();
                let divisor = if op == ReduceOp::Avg { n as f64 } else { 1.0 };
                for (i, got) in group.download(&x).unwrap().into_iter().enumerate() {
                    let terms = || (0..n).map(|rank| f64::from(operand(rank, i)));
                    let (sum, sizes) =
                        (terms().sum::<f64>() / divisor, terms().map(f64::abs).sum::<f64>() / divisor);
                    let error = (f64::from(got) - sum).abs();
                    assert!(
                        error <= wire.error_bound(n) * sizes,
                        "{op} as {wire}, element {i}: {got}, not {sum}"
                    );
                }
            }
        }
        let mut x = group.upload(&[1.0f64]).unwrap();
        let error = group.all_reduce_compressed(&mut x, ReduceOp::Sum, WireType::Bf16).unwrap_err();
        assert!(error.to_string().contains("takes f32 values, not f64"), "{error}");
        let error =
            group.all_reduce_compressed(&mut [1.0f32][..], ReduceOp::Sum, WireType::Bf16).unwrap_err();
        assert!(matches!(error, Error::Invalid(_)), "{error}");
    });
}

#[test]
#[ignore = "needs 2 GPUs"]
fn asynchronous_coalesced_and_timed_calls() {
    on_gpus("asynchronous_coalesced_and_timed_calls", 2, &nccl(), |rank| {
        let manager = rank.manager();
        manager.clear_profile();
        let group = manager.world();
        let device: Device = group.device().unwrap().clone();
        let ones = || DeviceBuffer::from_slice(&device, &vec![1.0f32; 1 << 20]).unwrap();
        let waited = group.all_reduce_async(ones(), ReduceOp::Sum).unwrap();
        let joined = group.all_reduce_async(ones(), ReduceOp::Sum).unwrap();
        // On the compute stream, behind the asynchronous one.
        let mut joined = joined.join().unwrap();
        group.all_reduce(&mut joined, ReduceOp::Sum).unwrap();
        let waited = waited.wait().unwrap();
        group.synchronize().unwrap();
        for (buffer, want) in [(&waited, 2.0), (&joined, 4.0)] {
            let values: Vec<f32> = buffer.to_vec(device.stream()).unwrap();
            assert!(values.iter().all(|v| *v == want));
        }
        // Many types and lengths in one group, among them some that need kernels of our own.
        let mut a = group.upload(&[1.0f32, f32::NAN]).unwrap();
        let mut b = group.upload(&[3i32; 1000]).unwrap();
        let mut c = group.upload::<f64>(&[]).unwrap();
        let mut d = group.upload(&[half::bf16::from_f32(2.0); 77]).unwrap();
        let many: &mut [&mut dyn BufferMut] = &mut [&mut a, &mut b, &mut c, &mut d];
        group.all_reduce_coalesced(many, ReduceOp::Max).unwrap();
        let a = group.download(&a).unwrap();
        assert!(a[0] == 1.0 && a[1].is_nan());
        assert_eq!(group.download(&b).unwrap(), [3; 1000]);
        assert_eq!(group.download(&d).unwrap(), [half::bf16::from_f32(2.0); 77]);
        // The first calls of a group, each of which needs more memory beside its buffer than all before.
        let rows = manager.profile();
        let mut fresh = manager.new_group(&[Rank(0), Rank(1)]).unwrap().unwrap();
        let me = fresh.rank().0;
        let mut many: Vec<_> =
            (0..9).map(|i| fresh.upload(&vec![(i * 2 + me) as f32; 64 << i]).unwrap()).collect();
        let mut all: Vec<&mut dyn BufferMut> = many.iter_mut().map(|x| x as &mut dyn BufferMut).collect();
        fresh.all_reduce_coalesced(&mut all, ReduceOp::Max).unwrap();
        for (i, x) in many.iter().enumerate() {
            assert!(fresh.download(x).unwrap().iter().all(|v| *v == (i * 2 + 1) as f32), "buffer {i}");
        }
        drop(fresh);
        let group = manager.world();
        let objects = group.all_gather_object(&format!("rank {}", group.rank())).unwrap();
        assert_eq!(objects, ["rank 0", "rank 1"]);
        let row = rows.iter().find(|r| r.bytes_up_to == 4 << 20 && r.op == "all_reduce").expect("a row");
        assert_eq!(row.calls, 3);
        assert!(row.path == "nccl" || row.path.starts_with("peer/"), "{row:?}");
        assert!(row.median_us > 0.0 && row.host_median_us.is_some_and(|h| h > 0.0), "{row:?}");
    });
}

/// An asynchronous call and a replayed graph run at the same time on two streams. They share no scratch memory.
#[test]
#[ignore = "needs 2 GPUs"]
fn asynchronous_calls_and_those_in_a_graph_leave_each_other_alone() {
    on_gpus("asynchronous_calls_and_those_in_a_graph_leave_each_other_alone", 2, &nccl(), |rank| {
        let group = rank.manager().world();
        let device: Device = group.device().unwrap().clone();
        let me = group.rank().0;
        // Chunks that say from whom they are and to whom they go.
        let half = 8 << 20;
        let sent = |what: f32| -> Vec<f32> {
            let chunk = |to: u32| std::iter::repeat_n(what + (10 * me + to) as f32, half);
            chunk(0).chain(chunk(1)).collect()
        };
        let came = |what: f32, got: &[f32]| {
            let from = |sender: u32| what + (10 * sender + me) as f32;
            got[..half].iter().all(|v| *v == from(0)) && got[half..].iter().all(|v| *v == from(1))
        };
        let mut buffer = DeviceBuffer::from_slice(&device, &sent(0.0)).unwrap();
        buffer = group.all_to_all_async(buffer).unwrap().wait().unwrap();
        let (mut graph, mut room) = (None, Some(buffer));
        let recorded = group
            .capture(|group| {
                #[expect(unsafe_code, reason = "a graph keeps addresses")]
                // SAFETY: buffer and group live until the graph is dropped, below.
                let captured = unsafe {
                    device.stream().capture(|| {
                        let buffer = room.take().expect("one call");
                        room = Some(group.all_to_all_async(buffer)?.join()?);
                        Ok::<_, Error>(())
                    })
                };
                graph = Some(captured?);
                Ok::<_, Error>(())
            })
            .unwrap();
        let (graph, mut buffer) = (graph.unwrap(), room.unwrap());
        for round in 1..10 {
            let (ours, theirs) = (100.0 * round as f32, 1000.0 + round as f32);
            buffer.write(device.stream(), &sent(ours)).unwrap();
            let beside = DeviceBuffer::from_slice(&device, &sent(theirs)).unwrap();
            let beside = group.all_to_all_async(beside).unwrap();
            group.replay::<Error>(&recorded, || Ok(graph.launch(device.stream())?)).unwrap();
            let beside = beside.wait().unwrap();
            group.synchronize().unwrap();
            assert!(came(theirs, &beside.to_vec::<f32>(device.stream()).unwrap()), "beside, round {round}");
            assert!(
                came(ours, &buffer.to_vec::<f32>(device.stream()).unwrap()),
                "in the graph, round {round}"
            );
        }
        drop(graph);
    });
}

#[test]
#[ignore = "needs 1 GPU"]
fn a_capture_that_panics_ends() {
    on_gpus("a_capture_that_panics_ends", 1, &nccl(), |rank| {
        let device: Device = rank.manager().world().device().unwrap().clone();
        let stream = device.stream();
        let x = DeviceBuffer::from_slice(&device, &[1.0f32; 100]).unwrap();
        let address = x.address();
        let capture = |panics: bool| {
            #[expect(unsafe_code, reason = "a graph keeps addresses")]
            // SAFETY: the buffer lives on, and nothing else uses it meanwhile.
            unsafe {
                stream.capture(|| {
                    stream.fill(address, 0, 200)?;
                    assert!(!panics, "on purpose");
                    Ok::<_, Error>(())
                })
            }
        };
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| capture(true).map(drop)));
        assert!(outcome.is_err() && !stream.is_capturing().unwrap());
        let graph = capture(false).unwrap();
        assert_eq!(x.to_vec::<f32>(stream).unwrap(), [1.0; 100]);
        graph.launch(stream).unwrap();
        assert_eq!(x.to_vec::<f32>(stream).unwrap(), [[0.0; 50], [1.0; 50]].concat());
    });
}

#[test]
#[ignore = "needs 1 GPU"]
fn what_other_threads_enqueue_is_done_at_once_and_no_part_of_a_capture() {
    on_gpus("what_other_threads_enqueue_is_done_at_once_and_no_part_of_a_capture", 1, &nccl(), |rank| {
        let device: Device = rank.manager().world().device().unwrap().clone();
        let stream = device.stream();
        let zeros = || DeviceBuffer::from_slice(&device, &[0u8; 4]).unwrap();
        let (captured, ours, engines) = (zeros(), zeros(), zeros());
        let fill = |buffer: &DeviceBuffer, value| {
            #[expect(unsafe_code, reason = "the stream takes addresses")]
            // SAFETY: the buffer lives on, and is read behind this in the stream only.
            unsafe { stream.fill(buffer.address(), value, 4) }.unwrap();
        };
        let capture = || {
            // Another capture on another thread, and work through the crate and past it, all on one stream.
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    fill(&ours, 1);
                    #[expect(unsafe_code, reason = "a graph keeps addresses")]
                    // SAFETY: the buffer lives on, and nothing else uses it meanwhile.
                    let own = unsafe {
                        stream.capture(|| {
                            fill(&ours, 2);
                            Ok::<_, Error>(())
                        })
                    };
                    own.unwrap().launch(stream).unwrap();
                    assert_eq!(ours.to_vec::<u8>(stream).unwrap(), [2; 4], "done while the other captures");
                    let engine = stream.cudarc();
                    engine.context().bind_to_thread().unwrap();
                    #[expect(unsafe_code, reason = "an engine's own call")]
                    // SAFETY: the buffer lives on, and is read behind this in the stream only.
                    unsafe {
                        cudarc::driver::result::memset_d8_async(engines.address(), 3, 4, engine.cu_stream())
                    }
                    .unwrap();
                });
            });
            fill(&captured, 4);
            assert!(stream.is_capturing().unwrap());
            Ok::<_, Error>(())
        };
        #[expect(unsafe_code, reason = "a graph keeps addresses")]
        // SAFETY: the buffer lives on, and nothing else uses it meanwhile.
        let graph = unsafe { stream.capture(capture) }.unwrap();
        assert_eq!(graph.nodes(), 1, "only what this thread enqueued");
        assert_eq!(engines.to_vec::<u8>(stream).unwrap(), [3; 4]);
        assert_eq!(captured.to_vec::<u8>(stream).unwrap(), [0; 4], "captured, not done");
        graph.launch(stream).unwrap();
        assert_eq!(captured.to_vec::<u8>(stream).unwrap(), [4; 4]);
    });
}

#[test]
#[ignore = "needs 2 GPUs"]
fn a_group_of_any_ranks_conforms() {
    on_gpus("a_group_of_any_ranks_conforms", 2, &nccl(), |rank| {
        let mut group = rank.manager().new_group(&[Rank(1), Rank(0)]).unwrap().unwrap();
        conformance::run(&mut group);
    });
}

#[test]
#[ignore = "needs 2 GPUs"]
fn host_memory_is_refused_and_the_group_goes_on() {
    on_gpus("host_memory_is_refused_and_the_group_goes_on", 2, &config(BackendChoice::Auto), |rank| {
        let manager = rank.manager();
        assert_eq!(manager.backend(), BackendKind::Nccl, "{}", manager.backend_reason());
        let group = manager.world();
        let error = group.all_reduce(&mut [1.0f32], ReduceOp::Sum).unwrap_err();
        assert!(matches!(error, Error::Invalid(_)), "{error}");
        assert!(error.to_string().contains("the buffer is in host memory"), "{error}");
        assert!(group.upload(&[0u8]).unwrap().view().host().is_err());
        group.barrier().unwrap();
    });
}

#[test]
#[ignore = "needs 4 GPUs"]
fn groups_of_the_layout_and_groups_of_any_ranks() {
    let mut config = nccl();
    config.layout.tensor_parallel = Some(2.try_into().unwrap());
    config.layout.data_parallel = 2.try_into().unwrap();
    on_gpus("groups_of_the_layout_and_groups_of_any_ranks", 4, &config, |rank| {
        let manager = rank.manager();
        let me = manager.rank();
        conformance::run(manager.tensor_parallel());
        sum_of_ranks(manager.tensor_parallel(), me);
        sum_of_ranks(manager.data_parallel(), me);
        sum_of_ranks(manager.pipeline_parallel(), me);
        for ranks in [[3, 1], [0, 2]] {
            if let Some(mut group) = manager.new_group(&ranks.map(Rank)).unwrap() {
                sum_of_ranks(&mut group, me);
            }
        }
        sum_of_ranks(manager.world(), me);
    });
}

#[test]
#[ignore = "needs 1 GPU"]
fn two_ranks_on_one_gpu_are_named_with_it() {
    const NAME: &str = "two_ranks_on_one_gpu_are_named_with_it";
    if role().is_some() {
        let error = initialize(&nccl()).unwrap_err().to_string();
        assert!(error.contains("ranks 0 and 1 on host") && error.contains("would share one GPU"), "{error}");
        return;
    }
    Ranks::start_at(NAME, 2, |_| 0).expect_all(PATIENCE);
}

/// Each rank sees one GPU, as with Slurm's `--gpus-per-task=1` and in containers: with and without LOCAL_RANK.
#[test]
#[ignore = "needs 2 GPUs"]
fn ranks_that_each_see_one_gpu_take_it_and_share_memory() {
    const NAME: &str = "ranks_that_each_see_one_gpu_take_it_and_share_memory";
    if role().is_some() {
        let mut rank = initialize(&nccl()).unwrap();
        let group = rank.manager().world();
        let one_shot = Path::PeerMemory(PeerAlgorithm::OneShot);
        let choice = group.explain(Operation::AllReduce(ReduceOp::Sum), DType::F32, 4).unwrap();
        assert_eq!(choice.path, one_shot, "{choice:?}");
        conformance::run(group);
        return rank.finalize().unwrap();
    }
    let n = some_gpus();
    for has_local_rank in [true, false] {
        let ranks = Ranks::start_with(NAME, n, |rank, command| {
            command.env("CUDA_VISIBLE_DEVICES", rank.to_string());
            if has_local_rank {
                command.env("LOCAL_RANK", rank.to_string());
            }
        });
        ranks.expect_all(PATIENCE);
    }
}

#[test]
#[ignore = "needs 2 GPUs"]
fn ranks_that_see_the_same_gpu_are_named_with_it() {
    const NAME: &str = "ranks_that_see_the_same_gpu_are_named_with_it";
    if role().is_some() {
        let error = initialize(&nccl()).unwrap_err().to_string();
        let words = ["ranks 0 and 1 on host", "would share one GPU", "GPU-", "CUDA_VISIBLE_DEVICES"];
        assert!(words.iter().all(|word| error.contains(word)), "{error}");
        return;
    }
    need(2);
    let ranks = Ranks::start_with(NAME, 2, |rank, command| {
        command.env("CUDA_VISIBLE_DEVICES", "1").env("LOCAL_RANK", rank.to_string());
    });
    ranks.expect_all(PATIENCE);
}

#[test]
#[ignore = "needs 2 GPUs"]
fn a_local_rank_without_a_gpu_is_named() {
    const NAME: &str = "a_local_rank_without_a_gpu_is_named";
    let here = gpus() as usize;
    if role().is_some() {
        let error = initialize(&nccl()).unwrap_err().to_string();
        let words =
            format!("each rank of a host needs a GPU, and CUDA shows {here}; start at most {here} rank");
        assert!(error.contains(&words) && error.contains(&format!("rank {here} cannot use it")), "{error}");
        return;
    }
    need(2);
    Ranks::start(NAME, here + 1).expect_all(PATIENCE);
}

#[test]
#[ignore = "needs 1 GPU"]
fn an_allocation_over_the_budget_says_the_sums() {
    let mut config = nccl();
    config.device.memory_fraction = "0.01".parse().unwrap();
    on_gpus("an_allocation_over_the_budget_says_the_sums", 1, &config, |rank| {
        let device: Device = rank.manager().world().device().unwrap().clone();
        let (_, limit) = device.budget();
        let error = DeviceBuffer::new(&device, DType::U8, limit as usize + 1).unwrap_err().to_string();
        assert!(
            error.contains("over the budget") && error.contains("device.memory_fraction = 0.01"),
            "{error}"
        );
        let held = DeviceBuffer::new(&device, DType::U8, 1 << 20).unwrap();
        let before = device.budget().0;
        drop(held);
        assert_eq!(before - device.budget().0, 1 << 20);
    });
}

/// Keys and back: the kernels that minima and maxima of floats go through, on one GPU, without NCCL.
#[test]
#[ignore = "needs 1 GPU"]
fn floats_come_back_from_their_keys_and_keys_are_in_the_order_of_the_floats() {
    fn there_and_back<F: Element, K: Element + Ord>(device: &Device, values: &[F]) {
        let source = include_str!("../../process_group/src/gpu/nccl/reductions.cu");
        let kind = format!("-DKIND={}", F::DTYPE as u8);
        for smallest in [0u8, 1] {
            let options = [kind.as_str(), &format!("-DSMALLEST={smallest}")];
            let module = device.kernels().module("reductions.cu", source, &options).unwrap();
            let x = DeviceBuffer::from_slice(device, values).unwrap();
            let keys = DeviceBuffer::new(device, K::DTYPE, values.len()).unwrap();
            let back = DeviceBuffer::new(device, F::DTYPE, values.len()).unwrap();
            let (count, launch) = (values.len() as u64, Launch::over(values.len(), 256));
            let (x, k, y) = (x.address(), keys.address(), back.address());
            #[expect(unsafe_code, reason = "kernels take addresses")]
            // SAFETY: the kernels take two addresses and a 64-bit count; all buffers have that many elements and live on.
            unsafe {
                module.kernel("to_keys").unwrap().launch(device.stream(), launch, &[&x, &k, &count]).unwrap();
                module
                    .kernel("from_keys")
                    .unwrap()
                    .launch(device.stream(), launch, &[&k, &y, &count])
                    .unwrap();
            }
            let back: Vec<F> = back.to_vec(device.stream()).unwrap();
            let keys: Vec<K> = keys.to_vec(device.stream()).unwrap();
            let same = |a: &F, b: &F| bytemuck::bytes_of(a) == bytemuck::bytes_of(b);
            // The last is NaN, outermost on the side that is wanted; the others are in their order.
            let (nan, ordered) = keys.split_last().unwrap();
            assert!(back.iter().zip(values).take(values.len() - 1).all(|(a, b)| same(a, b)), "{}", F::DTYPE);
            assert!(ordered.is_sorted_by(|a, b| a < b), "{}: {smallest}", F::DTYPE);
            assert!(if smallest == 1 { nan < &ordered[0] } else { nan > &ordered[ordered.len() - 1] });
        }
    }
    on_gpus("floats_come_back_from_their_keys_and_keys_are_in_the_order_of_the_floats", 1, &nccl(), |rank| {
        let device: Device = rank.manager().world().device().unwrap().clone();
        let some = [f64::NEG_INFINITY, -3e4, -1.5, -0.0, 0.0, 1e-4, 2.0, 3e4, f64::INFINITY, f64::NAN];
        there_and_back::<f64, i64>(&device, &some);
        there_and_back::<f32, i32>(&device, &some.map(|v| v as f32));
        there_and_back::<half::f16, i32>(&device, &some.map(half::f16::from_f64));
        there_and_back::<half::bf16, i32>(&device, &some.map(half::bf16::from_f64));
    });
}

#[test]
#[ignore = "needs 1 GPU"]
fn a_kept_kernel_that_is_cut_is_compiled_anew() {
    need(1);
    let folder = tempfile::tempdir().unwrap();
    let search = LibrarySearch::from_variables(|name| std::env::var(name).ok());
    let config = DeviceConfig { kernel_cache: Some(folder.path().into()), ..DeviceConfig::default() };
    let load = || {
        // Whoever has just taken the GPU has no kernels in memory.
        let libraries = Arc::new(Libraries::find(&config, &search));
        let device = Device::open(&libraries, LocalRank(0), &config).unwrap();
        let source = "extern \"C\" __global__ void nothing() {}";
        device.kernels().module("nothing.cu", source, &[]).unwrap().kernel("nothing").unwrap();
        let file = std::fs::read_dir(folder.path()).unwrap().next().unwrap().unwrap().path();
        (std::fs::read(&file).unwrap(), file)
    };
    let (whole, file) = load();
    for kept in [whole.len() - 1, whole.len() / 2, 100, 0] {
        std::fs::write(&file, &whole[..kept]).unwrap();
        assert_eq!(load().0.len(), whole.len(), "of {kept} bytes kept");
    }
}

#[test]
#[ignore = "needs 1 GPU"]
fn quotients_on_a_gpu_are_those_of_the_processor() {
    fn divided<T: Element>(device: &Device, values: &[T], by: impl Fn(T, u32) -> T) {
        let source = include_str!("../../process_group/src/gpu/nccl/reductions.cu");
        let options = [format!("-DKIND={}", T::DTYPE as u8), "-DSMALLEST=0".into()];
        let module =
            device.kernels().module("reductions.cu", source, &[options[0].as_str(), &options[1]]).unwrap();
        for ranks in [1u32, 3, 300] {
            let x = DeviceBuffer::from_slice(device, values).unwrap();
            let (address, count) = (x.address(), values.len() as u64);
            // Fewer threads than elements, so that each has several.
            let launch = Launch::over(values.len() / 3, 64);
            #[expect(unsafe_code, reason = "kernels take addresses")]
            // SAFETY: the kernel takes an address, a 64-bit and a 32-bit number; the buffer has that many elements.
            unsafe {
                module
                    .kernel("divide")
                    .unwrap()
                    .launch(device.stream(), launch, &[&address, &count, &ranks])
                    .unwrap();
            }
            let wanted: Vec<T> = values.iter().map(|v| by(*v, ranks)).collect();
            assert_eq!(x.to_vec::<T>(device.stream()).unwrap(), wanted, "{} / {ranks}", T::DTYPE);
        }
    }
    on_gpus("quotients_on_a_gpu_are_those_of_the_processor", 1, &nccl(), |rank| {
        let device: Device = rank.manager().world().device().unwrap().clone();
        macro_rules! integers {
            ($($type:ty),*) => {$({
                let mut values: Vec<$type> = (0..1021u64).map(|i| i.wrapping_mul(0x9e37_79b9_7f4a_7c15) as $type).collect();
                values.extend([<$type>::MIN, <$type>::MAX, 0]);
                divided(&device, &values, |v, n| (i128::from(v) / i128::from(n)) as $type);
            })*};
        }
        integers!(i8, u8, i32, u32, i64, u64);
        let floats: Vec<f32> = (0..1024).map(|i| (i as f32 - 500.0) * 1.7).collect();
        divided(&device, &floats, |v, n| v / n as f32);
        let doubles: Vec<f64> = floats.iter().map(|v| f64::from(*v) * 1e100).collect();
        divided(&device, &doubles, |v, n| v / f64::from(n));
        let halves: Vec<half::f16> = floats.iter().map(|v| half::f16::from_f32(*v)).collect();
        divided(&device, &halves, |v, n| half::f16::from_f32(v.to_f32() / n as f32));
        let brains: Vec<half::bf16> = floats.iter().map(|v| half::bf16::from_f32(*v)).collect();
        divided(&device, &brains, |v, n| half::bf16::from_f32(v.to_f32() / n as f32));
    });
}

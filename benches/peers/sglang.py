"""SGLang's all-reduce kernels on the GPUs of one host, by the method of `graph_latency`: what our kernels are compared with.

    torchrun --nproc-per-node 2 benches/peers/sglang.py SITE [--out FILE]

SITE is a folder into which the wheels sglang 0.5.23, apache-tvm-ffi 0.1.11 and msgspec are unpacked, side by side. Only the modules of
the kernels are loaded, not the server. The kernels are compiled at first use, with nvcc.

One line of JSON for each size, in bf16. Microseconds of a call: a graph of 20 calls, each on what the one before returned, divided
by 20; the median of 20 replays on the slowest rank. Pull kernels read the input of their peers, so their calls do not depend on
each other. The first result of each is compared with a sum in f32. Multicast is not used.
"""
import argparse, json, os, pathlib, statistics, sys, types
import torch, torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric

CALLS, REPLAYS, WARM_UP = 20, 20, 3
SIZES = [1 << power for power in range(10, 27) if power != 25]
PUSH_BYTES, PULL_BYTES, PULL_BLOCKS, FLAG_BYTES = 16 << 20, 64 << 20, 64, 128


def load_kernels(site):
    """SGLang's kernel modules, with stand-ins for the packages around them."""
    sys.path.insert(0, str(site))
    packages = ["sglang", "sglang.kernels", "sglang.kernels.ops", "sglang.kernels.ops.communication", "sglang.srt", "sglang.srt.utils"]
    for name in packages:
        module = types.ModuleType(name)
        module.__path__ = [str(site / name.replace(".", "/"))]
        sys.modules[name] = module
    stand_ins = {
        "sglang.srt.utils.common": {"is_cuda": lambda: True, "is_hip": lambda: False},
        "sglang.srt.utils.custom_op": {"register_custom_op": lambda fn=None, **_: fn if fn is not None else (lambda f: f)},
        "sglang.utils": {"is_in_ci": lambda: False},
    }
    for name, content in stand_ins.items():
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(content)
    import sglang.kernels.ops.communication.all_reduce as plain
    import sglang.kernels.ops.communication.all_reduce_fusion as fused
    return plain, fused


def connect(plain, rank, ranks):
    """A communicator over symmetric memory, and what it needs to stay alive."""
    push_end = 2 * ranks * PUSH_BYTES
    total = push_end + PULL_BYTES + FLAG_BYTES * PULL_BLOCKS
    memory = symmetric.empty(total, dtype=torch.uint8, device="cuda")
    handle = symmetric.rendezvous(memory, dist.group.WORLD)
    assert not handle.multicast_ptr, "multicast must stay off: set TORCH_SYMM_MEM_DISABLE_MULTICAST=1"
    parts = [handle.get_buffer(peer, [total], torch.uint8) for peer in range(ranks)]
    parts[rank].zero_()
    torch.cuda.synchronize()
    dist.barrier()

    def cut(start, *shape):
        length = int(torch.tensor(shape).prod())
        return [part[start:start + length].view(shape) for part in parts]

    blocks = torch.cuda.get_device_properties(rank).multi_processor_count
    counter = torch.zeros(blocks, dtype=torch.uint32, device="cuda")
    push = plain.PushPlane(rank, ranks, workspaces=cut(0, 2 * ranks, PUSH_BYTES), counter=counter.view(-1, 1).view(torch.uint8))
    semaphores = cut(push_end + PULL_BYTES, PULL_BLOCKS, FLAG_BYTES)
    pull = plain.PullPlane(rank, ranks, workspaces=cut(push_end, PULL_BYTES), semaphores=semaphores)
    return plain.Communicator(push=push, pull=pull), (memory, handle, parts, counter)


def latency(call, calls=CALLS):
    """Microseconds of a call in a graph, on the slowest rank."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    times = []
    for replay in range(WARM_UP + REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        if replay >= WARM_UP:
            times.append(start.elapsed_time(end) * 1000 / calls)
    slowest = torch.tensor([statistics.median(times)], device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return round(slowest.item(), 2)


def near(got, want, tolerance):
    error = ((got.float() - want).norm() / want.norm()).item()
    assert error < tolerance, f"the relative error is {error}"


def main():
    flags = argparse.ArgumentParser()
    flags.add_argument("site", type=pathlib.Path)
    flags.add_argument("--out")
    flags = flags.parse_args()
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    ranks = dist.get_world_size()
    plain, fused = load_kernels(flags.site)
    # One rank compiles; the others find what it has compiled.
    if rank == 0:
        plain._init_communicator()
        plain.get_all_reduce_module(torch.bfloat16, ranks)
    dist.barrier()
    communicator, _keep = connect(plain, rank, ranks)
    fused.register_comm(communicator)
    rows = []

    def tell(row):
        rows.append(row)
        if rank == 0:
            print(json.dumps(row), flush=True)

    algorithms = plain.AllReduceAlgo
    for size in SIZES:
        count = size // 2
        x = symmetric.empty(count, dtype=torch.bfloat16, device="cuda").normal_()
        handle = symmetric.rendezvous(x, dist.group.WORLD)
        inputs = [handle.get_buffer(peer, [count], torch.bfloat16).data_ptr() for peer in range(ranks)]
        inputs = torch.tensor(inputs, dtype=torch.uint64, device="cuda")
        want = x.float()
        dist.all_reduce(want)
        row = {"op": "all_reduce", "bytes": size, "world_size": ranks}
        for algorithm in (algorithms.ONE_SHOT_PUSH, algorithms.TWO_SHOT_PUSH, algorithms.ONE_SHOT_PULL, algorithms.TWO_SHOT_PULL):
            if size > 8 << 20 and algorithm != algorithms.TWO_SHOT_PULL:
                continue
            near(plain.custom_all_reduce(communicator, x, algorithm, graph_params=None if algorithm.is_push() else inputs), want, 5e-3)
            current = [x]

            def call():
                given = None if algorithm.is_push() else inputs
                result = plain.custom_all_reduce(communicator, current[0], algorithm, graph_params=given)
                if algorithm.is_push():
                    current[0] = result

            row[algorithm.algo_name] = latency(call, CALLS if size <= 16 << 20 else CALLS // 5)
        tell(row)
    for hidden in (4096, 8192):
        for tokens in (1, 4, 8, 16, 32, 64, 128):
            y, residual = (torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16) for _ in range(2))
            weight = torch.ones(hidden, device="cuda", dtype=torch.bfloat16)
            sum_of_all = y.float()
            dist.all_reduce(sum_of_all)
            added = sum_of_all.bfloat16() + residual
            want = torch.nn.functional.rms_norm(added.float(), (hidden,))
            row = {"op": "all_reduce_add_norm", "bytes": tokens * hidden * 2, "shape": [tokens, hidden], "world_size": ranks}
            for two_shot in (False, True):
                if two_shot and tokens < ranks:
                    continue
                current, added_out = [y], torch.empty_like(residual)

                def call():
                    current[0], _ = fused.all_reduce_residual_norm(
                        current[0], residual, weight, 1e-6, world_size=ranks, residual_out=added_out, two_shot=two_shot)

                call()
                near(current[0], want, 2e-2)
                row["two_shot" if two_shot else "one_shot"] = latency(call)
            tell(row)
    if rank == 0 and flags.out:
        pathlib.Path(flags.out).write_text(json.dumps(rows))
    dist.barrier()
    # The modules' own ends do not expect that the process group is gone.
    os._exit(0)


if __name__ == "__main__":
    main()

"""NCCL's collectives through torch.distributed, on the GPUs of one host: what `ryz bench --backend nccl` is compared with.

    torchrun --nproc-per-node 4 benches/peers/nccl.py [--dtype f32] [--out FILE]

One line of JSON for each operation and size: microseconds for one call, the median of the slowest rank.
`graph_us`: replays of a CUDA graph with several calls; `eager_us`: calls back to back, by the host's clock until the GPU
is done; `host_us`: until the calls have returned. The values of a first call are checked and, at the end, a replay is compared with the same calls one by one; timed calls move zeros. Multicast (NVLS) is as the environment sets it.
"""
import argparse, json, os, statistics, time
import torch, torch.distributed as dist

SIZES = [1 << 10, 8 << 10, 64 << 10, 100_000, 1 << 20, 10_000_000, 16 << 20, 100_000_000, 256 << 20]
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}

def main():
    flags = argparse.ArgumentParser()
    flags.add_argument("--dtype", default="f32", choices=DTYPES)
    flags.add_argument("--out")
    flags = flags.parse_args()
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    n, dtype, rows = dist.get_world_size(), DTYPES[flags.dtype], []

    def greatest(value):
        t = torch.tensor([value], device="cuda", dtype=torch.float64)
        dist.all_reduce(t, op=dist.ReduceOp.MAX)
        return round(t.item(), 2)

    for size in SIZES:
        count = size // dtype.itemsize // n * n
        x = torch.zeros(count, device="cuda", dtype=dtype)
        y = torch.zeros(count, device="cuda", dtype=dtype)
        part, mine = count // n, slice(rank * (count // n), (rank + 1) * (count // n))
        ops = {
            "all_reduce": lambda: dist.all_reduce(x),
            "broadcast": lambda: dist.broadcast(x, 0),
            "reduce": lambda: dist.reduce(x, 0),
            "all_gather": lambda: dist.all_gather_into_tensor(x, x[mine]),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(x[mine], x),
            "all_to_all": lambda: dist.all_to_all_single(y, x),
        }
        for name, call in ops.items():
            x.fill_(rank + 1)
            call()
            want = {"all_reduce": n * (n + 1) / 2, "broadcast": 1, "all_gather": None, "all_to_all": None}.get(name, False)
            if want is None:
                got = y if name == "all_to_all" else x
                right = all((got[p * part:(p + 1) * part] == p + 1).all().item() for p in range(n))
            elif want is False:
                right = name == "reduce" and rank != 0 or ((x if name == "reduce" else x[mine]) == n * (n + 1) / 2).all().item()
            else:
                right = (x == want).all().item()
            assert right, (name, size)
            x.zero_()
            per, replays = (20, 15) if size <= 16 << 20 else (4, 10)
            calls = 200 if size <= 1 << 20 else 20
            for _ in range(5):
                call()
            torch.cuda.synchronize()
            dist.barrier()
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(calls):
                call()
            host = (time.perf_counter() - began) / calls * 1e6
            torch.cuda.synchronize()
            eager = (time.perf_counter() - began) / calls * 1e6
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(per):
                    call()
            times = []
            for _ in range(replays + 3):
                dist.barrier()
                torch.cuda.synchronize()
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                graph.replay()
                start.record()
                graph.replay()
                end.record()
                torch.cuda.synchronize()
                times.append(start.elapsed_time(end) * 1000 / per)
            # With operands that show it: a replay gives what the same calls give one by one.
            x.fill_(rank + 1)
            y.fill_(rank + 1)
            for _ in range(per):
                call()
            want = x.clone(), y.clone()
            x.fill_(rank + 1)
            y.fill_(rank + 1)
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(x, want[0]) and torch.equal(y, want[1]), (name, size, "replayed")
            row = {"op": name, "dtype": flags.dtype, "bytes": size, "world_size": n, "graph_us": greatest(statistics.median(times[3:])),
                   "eager_us": greatest(eager), "host_us": greatest(host)}
            del graph
            rows.append(row)
            if rank == 0:
                print(json.dumps(row), flush=True)
    if rank == 0 and flags.out:
        with open(flags.out, "w") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    dist.barrier()
    dist.destroy_process_group()

main()

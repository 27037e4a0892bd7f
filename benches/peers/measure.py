"""How every CPU peer here is measured; the peers differ only in the communicator they hand to `run`.

f32 sum all-reduce and broadcast from rank 0. A call takes as long as its slowest rank:
- `median_us`, `p99_us`: one call, started together after a barrier.
- `back_to_back_us`: calls following one another without a barrier, per call.
- `broadcast_us`: median of one broadcast after a barrier.
- `errors`: elements that came out wrong, over all ranks and all timed calls. Every call has operands of its own, the
  buffer that receives is poisoned first, and every element of the result is compared; integers keep the sums exact.
"""
import json
import math
import time

import numpy as np

SIZES = [1024, 8192, 65536, 262144, 1 << 20, 4 << 20, 10_000_000, 16 << 20, 100_000_000]
WORK = 2e8  # bytes all ranks together pass through one measurement, between 5 and 400 calls


def sizes_from(args):
    sizes = [int(a) for a in args] or SIZES
    bad = [b for b in sizes if b < 4 or b % 4]
    if bad:
        raise SystemExit(f"sizes are bytes of f32, multiples of 4: {bad}")
    return sizes


def percentile(values, share):
    """Nearest rank: with few calls the 99th percentile is the greatest."""
    values = sorted(values)
    return values[min(len(values) - 1, math.ceil(share * len(values)) - 1)]


def microseconds(call):
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e6


class Buffers:
    def __init__(self, count, world):
        self.x = np.zeros(count, np.float32)  # the operand; the result too where the communicator works in place
        self.y = np.zeros(count, np.float32)  # the result otherwise
        self.want = np.empty(count, np.float32)
        self.base = (np.arange(count) % 1021).astype(np.float32)
        self.total = self.base * world

    def wrong(self, result):
        return int(np.count_nonzero(result != self.want))


def one_size(comm, count):
    """comm: rank, world, in_place, barrier(), all_reduce(x, y) -> the buffer with the result, broadcast(x), maximum(list), total(int)."""
    rank, world = comm.rank, comm.world
    b = Buffers(count, world)
    calls = max(5, min(400, int(WORK // max(count * 4 * world, 4000))))
    errors = 0
    for _ in range(max(2, calls // 10)):
        comm.all_reduce(b.x, b.y)

    single = []
    for i in range(calls):
        np.add(b.base, rank + i % 7, out=b.x)
        np.add(b.total, world * (world - 1) // 2 + world * (i % 7), out=b.want)
        b.y.fill(np.nan)
        comm.barrier()
        single.append(microseconds(lambda: comm.all_reduce(b.x, b.y)))
        errors += b.wrong(b.x if comm.in_place else b.y)

    # In place, every call multiplies by the world size: as many in a row as f32 holds exactly, then fresh operands.
    power_of_two = world & (world - 1) == 0
    row = calls if not comm.in_place or world == 1 else int((96 if power_of_two else 20) / math.log2(world))
    spent, done = 0.0, 0
    while done < calls:
        n = min(row, calls - done)
        np.mod(b.base, 4, out=b.x)
        b.x += 1
        np.multiply(b.x, float(world) ** (n if comm.in_place else 1), out=b.want)
        b.y.fill(np.nan)

        def in_a_row():
            for _ in range(n):
                comm.all_reduce(b.x, b.y)

        comm.barrier()
        spent += microseconds(in_a_row)
        done += n
        errors += b.wrong(b.x if comm.in_place else b.y)

    cast = []
    for i in range(max(5, calls // 4)):
        np.add(b.base, i % 7, out=b.want)
        b.x[:] = b.want if rank == 0 else np.nan
        comm.barrier()
        cast.append(microseconds(lambda: comm.broadcast(b.x)))
        errors += b.wrong(b.x)

    # Each call's slowest rank, then percentiles over calls.
    single, cast, (back_to_back,) = comm.maximum(single), comm.maximum(cast), comm.maximum([spent / calls])
    figures = [percentile(single, 0.5), percentile(single, 0.99), back_to_back, percentile(cast, 0.5)]
    names = ["median_us", "p99_us", "back_to_back_us", "broadcast_us"]
    return {"bytes": count * 4, "world_size": world, **{k: round(v, 1) for k, v in zip(names, figures)}, "errors": comm.total(errors)}


def run(comm, sizes):
    """A JSON line per size from rank 0; the number of errors in all."""
    errors = 0
    for size in sizes:
        line = one_size(comm, size // 4)
        errors += line["errors"]
        if comm.rank == 0:
            print(json.dumps(line), flush=True)
    return errors

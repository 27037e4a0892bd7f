"""How every CPU peer here is measured; the peers differ only in the communicator they hand to `run`.

f32: all-reduce and reduce-scatter that add, all-gather, and broadcast from rank 0. `bytes` is the whole array: each rank of a
gather or scatter has its share. Every timed call starts after a barrier and takes as long as its slowest rank: `median_us`, `p99_us`.
`errors` counts wrong elements of all ranks and timed calls. Every call has its own operands, the buffer that receives is poisoned
first, and every element of the result is compared; integers keep the sums exact.
"""
import argparse
import json
import math
import time

import numpy as np

OPERATIONS = ["all_reduce", "broadcast", "all_gather", "reduce_scatter"]
SIZES = [1_000, 8_000, 64_000, 256_000, 1_000_000, 4_000_000, 10_000_000, 100_000_000]
ROTATED = 128 << 20  # bytes of all buffers between which calls rotate, as far as four go
WORK = 4e8  # bytes that all ranks together pass through one measurement, between 9 and 1000 calls


def flags(doc):
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", type=lambda text: text.split(","), default=OPERATIONS)
    parser.add_argument("--sizes", type=lambda text: [int(size) for size in text.split(",")], default=SIZES)
    return parser


def percentile(values, share):
    """Nearest rank: with few calls the 99th percentile is the greatest."""
    values = sorted(values)
    return values[min(len(values) - 1, math.ceil(share * len(values)) - 1)]


def zeros(count):
    """An array of float32 that begins with a cache line, as ours and those of torch do."""
    raw = np.zeros(count * 4 + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + count * 4].view(np.float32)


class Slot:
    """One call's operand and outcome. Calls take turns with several, as `ryz bench` does, so that caches are as cold as in use."""

    def __init__(self, comm, operation, count):
        self.operation, self.rank, self.world = operation, comm.rank, comm.world
        self.mine = slice(self.rank * (count // self.world), (self.rank + 1) * (count // self.world))
        self.buffer = zeros(count)
        self.call, self.result = comm.prepare(operation, self.buffer)

    def fill(self, base, shift):
        """Sets the operand and poisons where the outcome goes."""
        self.result.fill(np.nan)
        if self.operation in ("all_reduce", "reduce_scatter"):
            np.add(base, self.rank + shift, out=self.buffer)
        elif self.operation == "all_gather":
            np.add(base[self.mine], shift, out=self.buffer[self.mine])
        elif self.rank == 0:
            np.add(base, shift, out=self.buffer)

    def wrong(self, base, shift):
        """Elements that are not as they must be."""
        want = base + shift
        if self.operation in ("all_reduce", "reduce_scatter"):
            want = base * self.world + (self.world * (self.world - 1) // 2 + self.world * shift)
        return int(np.count_nonzero(self.result != (want[self.mine] if self.operation == "reduce_scatter" else want)))


def one(comm, operation, count):
    """comm: rank, world, barrier(), maximum(list), total(int), and prepare(operation, buffer) -> (call, result): `buffer` holds the
    operand, and `call` leaves the outcome in `result`."""
    count -= count % comm.world
    base = (np.arange(count) % 1021).astype(np.float32)
    slots = [Slot(comm, operation, count) for _ in range(max(1, min(4, ROTATED // (count * 4))))]
    calls = max(9, min(1000, int(WORK // max(count * 4 * comm.world, 4000))))
    times, errors, done = [], 0, -max(2, calls // 10)
    while done < calls:
        for at, slot in enumerate(slots):
            slot.fill(base, (done + at) % 7)
        for slot in slots:
            comm.barrier()
            start = time.perf_counter()
            slot.call()
            times.append((time.perf_counter() - start) * 1e6)
        errors += sum(slot.wrong(base, (done + at) % 7) for at, slot in enumerate(slots))
        done += len(slots)
        if done <= 0:
            times.clear()
    times = comm.maximum(times)
    return {
        "op": operation,
        "bytes": count * 4,
        "world_size": comm.world,
        "median_us": round(percentile(times, 0.5), 1),
        "p99_us": round(percentile(times, 0.99), 1),
        "errors": comm.total(errors),
    }


def run(comm, arguments):
    """A JSON line for each operation and size from rank 0; fails if an element was wrong."""
    errors = 0
    for operation in arguments.op:
        for size in arguments.sizes:
            line = one(comm, operation, size // 4)
            errors += line["errors"]
            if comm.rank == 0:
                print(json.dumps(line), flush=True)
    if errors:
        raise SystemExit(f"{errors} wrong elements")

"""Gloo as torch.distributed ships it, CPU ranks of one host over loopback TCP.

python gloo.py WORLD [BYTES ...]    # a JSON line per size, see measure.py; fails if a result was wrong
"""
import os
import socket
import sys
import time
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import measure


class Gloo:
    in_place = True

    def __init__(self, rank, world):
        self.rank, self.world = rank, world

    def barrier(self):
        dist.barrier()

    def all_reduce(self, x, _):
        dist.all_reduce(torch.from_numpy(x))

    def broadcast(self, x):
        dist.broadcast(torch.from_numpy(x), 0)

    def maximum(self, values):
        t = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(t, op=dist.ReduceOp.MAX)
        return t.tolist()

    def total(self, value):
        t = torch.tensor([value], dtype=torch.int64)
        dist.all_reduce(t)
        return t.item()


def rank_main(rank, world, port, sizes, started):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world,
                            timeout=timedelta(seconds=120))
    comm = Gloo(rank, world)
    first = np.ones(1, np.float32)
    comm.all_reduce(first, None)
    assert first[0] == world
    if rank == 0:
        print(f"torch {torch.__version__}, world {world}, {time.time() - started:.2f} s to the first result", file=sys.stderr)
    errors = measure.run(comm, sizes)
    dist.destroy_process_group()
    if errors:
        raise SystemExit(f"{errors} wrong elements")


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


if __name__ == "__main__":
    if len(sys.argv) < 2 or not sys.argv[1].isdigit() or int(sys.argv[1]) < 1:
        raise SystemExit(__doc__)
    world = int(sys.argv[1])
    mp.spawn(rank_main, (world, free_port(), measure.sizes_from(sys.argv[2:]), time.time()), nprocs=world)

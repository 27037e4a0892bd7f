"""Gloo as torch.distributed ships it, CPU ranks of one host over loopback TCP.

python gloo.py WORLD [--op OP,...] [--sizes BYTES,...]    # a JSON line for each operation and size, see measure.py
"""
import os
import socket
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import measure


class Gloo:
    def __init__(self, rank, world):
        self.rank, self.world = rank, world

    def barrier(self):
        dist.barrier()

    def prepare(self, operation, buffer):
        tensor = torch.from_numpy(buffer)
        if operation == "all_reduce":
            return lambda: dist.all_reduce(tensor), buffer
        if operation == "broadcast":
            return lambda: dist.broadcast(tensor, 0), buffer
        share = len(buffer) // self.world
        if operation == "reduce_scatter":
            out = measure.zeros(share)
            return lambda: dist.reduce_scatter_tensor(torch.from_numpy(out), tensor), out
        mine = tensor[self.rank * share:(self.rank + 1) * share]
        return lambda: dist.all_gather_into_tensor(tensor, mine), buffer

    def maximum(self, values):
        t = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(t, op=dist.ReduceOp.MAX)
        return t.tolist()

    def total(self, value):
        t = torch.tensor([value], dtype=torch.int64)
        dist.all_reduce(t)
        return t.item()


def rank_main(rank, world, port, arguments, started):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world,
                            timeout=timedelta(seconds=120))
    first = torch.ones(1)
    dist.all_reduce(first)
    assert first.item() == world
    if rank == 0:
        print(f"torch {torch.__version__}, world {world}, {time.time() - started:.2f} s to the first result", file=sys.stderr)
    measure.run(Gloo(rank, world), arguments)
    dist.destroy_process_group()


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


if __name__ == "__main__":
    parser = measure.flags(__doc__)
    parser.add_argument("world", type=int)
    arguments = parser.parse_args()
    mp.spawn(rank_main, (arguments.world, free_port(), arguments, time.time()), nprocs=arguments.world)

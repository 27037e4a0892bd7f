"""Open MPI through mpi4py, CPU ranks of one host.

Over loopback TCP:
    mpirun --oversubscribe --bind-to none -np 4 --mca pml ob1 --mca btl tcp,self --mca btl_tcp_if_include lo \
           --mca mpi_yield_when_idle 1 python open_mpi.py [--op OP,...] [--sizes BYTES,...]
With a CPU for each rank, 0 instead of 1. This script then binds each rank to one: `mpirun` of Open MPI 5 binds to CPUs that it may not use.
Through shared memory: `--mca btl vader,self` instead (Open MPI 5: `sm,self`). As root add --allow-run-as-root.
A JSON line for each operation and size, see measure.py.
"""
import os
import sys

CPUS = sorted(os.sched_getaffinity(0))
if int(os.environ["OMPI_COMM_WORLD_SIZE"]) <= len(CPUS):
    os.sched_setaffinity(0, {CPUS[int(os.environ["OMPI_COMM_WORLD_LOCAL_RANK"])]})

import numpy as np
from mpi4py import MPI

import measure


class OpenMpi:
    def __init__(self):
        self.comm = MPI.COMM_WORLD
        self.rank, self.world = self.comm.rank, self.comm.size

    def barrier(self):
        self.comm.Barrier()

    def prepare(self, operation, buffer):
        """Reductions out of place, the others in place: each the way that is faster and usual."""
        if operation == "all_reduce":
            out = measure.zeros(len(buffer))
            return lambda: self.comm.Allreduce(buffer, out), out
        if operation == "reduce_scatter":
            out = measure.zeros(len(buffer) // self.world)
            return lambda: self.comm.Reduce_scatter_block(buffer, out), out
        if operation == "broadcast":
            return lambda: self.comm.Bcast(buffer, root=0), buffer
        return lambda: self.comm.Allgather(MPI.IN_PLACE, buffer), buffer

    def maximum(self, values):
        return [self.comm.allreduce(v, op=MPI.MAX) for v in values]

    def total(self, value):
        return self.comm.allreduce(value)


if __name__ == "__main__":
    arguments = measure.flags(__doc__).parse_args()
    comm = OpenMpi()
    if comm.rank == 0:
        print(MPI.Get_library_version().split(",")[0], f"world {comm.world}", sep=", ", file=sys.stderr)
    measure.run(comm, arguments)

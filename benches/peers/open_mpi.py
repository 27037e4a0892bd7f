"""Open MPI through mpi4py, CPU ranks of one host.

Over loopback TCP:
    mpirun --oversubscribe -np 4 --mca pml ob1 --mca btl tcp,self --mca btl_tcp_if_include lo \
           --mca mpi_yield_when_idle 1 python open_mpi.py [BYTES ...]
Through shared memory: `--mca btl vader,self` instead (Open MPI 5: `sm,self`). As root add --allow-run-as-root.
A JSON line per size, see measure.py; fails if a result was wrong.
"""
import sys

from mpi4py import MPI

import measure


class OpenMpi:
    in_place = False

    def __init__(self):
        self.comm = MPI.COMM_WORLD
        self.rank, self.world = self.comm.rank, self.comm.size

    def barrier(self):
        self.comm.Barrier()

    def all_reduce(self, x, y):
        self.comm.Allreduce(x, y)

    def broadcast(self, x):
        self.comm.Bcast(x, root=0)

    def maximum(self, values):
        return [self.comm.allreduce(v, op=MPI.MAX) for v in values]

    def total(self, value):
        return self.comm.allreduce(value)


if __name__ == "__main__":
    comm = OpenMpi()
    if comm.rank == 0:
        print(MPI.Get_library_version().split(",")[0], f"world {comm.world}", sep=", ", file=sys.stderr)
    if measure.run(comm, measure.sizes_from(sys.argv[1:])):
        raise SystemExit("wrong elements")

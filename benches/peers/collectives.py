"""Our collectives on one host's CPUs next to Open MPI's and Gloo's, in turn.

python collectives.py RYZ [--ranks 2,4] [--rounds 3] [--only NAME,...] [--op OP,...] [--sizes BYTES,...] [--json FILE]

Runs `ryz bench` and the peers of this folder one after the other, --rounds times, and prints the median over the rounds of each
median and 99th percentile, in microseconds. NAMEs: ours, open_mpi, ours_tcp, open_mpi_tcp, gloo. Any wrong element fails the run.
"""
import json
import os
import pathlib
import statistics
import subprocess
import sys

import measure

HERE = pathlib.Path(__file__).parent
MPIRUN = ["mpirun", "--oversubscribe", "--bind-to", "none", "--mca", "pml", "ob1"]
# numpy asks for huge pages from 4 MiB on, which other programs, ours too, do not.
ORDINARY_PAGES = {"NUMPY_MADVISE_HUGEPAGE": "0"}
TCP = ["--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", "lo"]


def shared_memory():
    """Open MPI's transport through shared memory, which version 5 calls `sm`."""
    version = subprocess.run(["mpirun", "--version"], capture_output=True, text=True).stdout
    old = any(f"(Open MPI) {number}." in version for number in (3, 4))
    return ["--mca", "btl", "vader,self" if old else "sm,self"]


def ours(arguments, ranks, work, shared_memory):
    sizes = ",".join(f"{size}B" for size in arguments.sizes)
    command = [arguments.ryz, "bench", "-n", str(ranks), "--backend", "tcp", "--op", ",".join(arguments.op), "--sizes", sizes]
    return command + ["--format", "json"], {"RYZ_PROCESS_GROUP__TCP__SHARED_MEMORY": shared_memory}


def open_mpi(arguments, ranks, work, flags):
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    # Its fastest settings: ranks yield if they outnumber the CPUs; otherwise open_mpi.py binds each to one. Ours are not bound.
    yields = ["--mca", "mpi_yield_when_idle", str(int(ranks > len(os.sched_getaffinity(0))))]
    return MPIRUN + yields + root + ["-np", str(ranks), *(flags or shared_memory()), sys.executable, str(HERE / "open_mpi.py"), *work], {}


def gloo(arguments, ranks, work, _):
    return [sys.executable, str(HERE / "gloo.py"), str(ranks), *work], {}


SYSTEMS = {
    "ours": (ours, "true"),
    "open_mpi": (open_mpi, None),
    "ours_tcp": (ours, "false"),
    "open_mpi_tcp": (open_mpi, TCP),
    "gloo": (gloo, None),
}


def main():
    parser = measure.flags(__doc__)
    parser.add_argument("ryz")
    parser.add_argument("--ranks", type=lambda text: [int(n) for n in text.split(",")], default=[2, 4])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(SYSTEMS))
    parser.add_argument("--json")
    arguments = parser.parse_args()
    work = ["--op", ",".join(arguments.op), "--sizes", ",".join(map(str, arguments.sizes))]
    results = []
    for ranks in arguments.ranks:
        found = {}
        for _ in range(arguments.rounds):
            for name in arguments.only:
                make, detail = SYSTEMS[name]
                command, environment = make(arguments, ranks, work, detail)
                done = subprocess.run(
                    command, env={**os.environ, **ORDINARY_PAGES, **environment}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
                )
                if done.returncode != 0:
                    sys.exit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr}")
                rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
                for at, row in enumerate(row for row in rows if "op" in row):
                    if row["errors"]:
                        sys.exit(f"{name}: {row['errors']} wrong elements: {row}")
                    key = (row["op"], arguments.sizes[at % len(arguments.sizes)], name)
                    found.setdefault(key, []).append((row["median_us"], row["p99_us"]))
        for operation in arguments.op:
            print(f"\n{operation}, {ranks} ranks: median (p99), µs")
            print(f"{'bytes':>11}" + "".join(f"{name:>22}" for name in arguments.only))
            for size in arguments.sizes:
                line = f"{size:>11}"
                for name in arguments.only:
                    median, p99 = (statistics.median(part) for part in zip(*found[operation, size, name]))
                    line += f"{f'{median:.1f} ({p99:.1f})':>22}"
                    results.append(
                        {"op": operation, "ranks": ranks, "bytes": size, "system": name, "median_us": median, "p99_us": p99}
                    )
                print(line, flush=True)
    if arguments.json:
        pathlib.Path(arguments.json).write_text(json.dumps(results))


if __name__ == "__main__":
    main()

# The commands people repeat. `just --list` names them.

# Four ranks find each other, prove their collectives and run a sharded model.
demo:
    cargo run --release -- launch --world-size 4

# All tests.
test:
    cargo test --workspace

# What continuous integration runs.
ci:
    ./.ci/run

# Formats everything.
fmt:
    cargo fmt --all

# Our collectives on CPUs compared with Open MPI's and Gloo's, in turn; needs Open MPI, and a Python with torch, numpy and mpi4py
# (benches/peers/README.md).
bench-peers python:
    cargo build --release
    {{python}} benches/peers/collectives.py target/release/ryz

# Gradients reduced in buckets during a backward pass.
bench-overlap ranks:
    cargo build --release
    target/release/ryz bench --vary overlap -n {{ranks}}

# The same on two hosts, which are network namespaces, with a cable of RATE, such as 1gbit, between them; needs root.
bench-overlap-hosts rate:
    cargo build --release
    scripts/two-hosts target/release 1 {{rate}} target/release/ryz bench --vary overlap

# What a token costs when several sequences get one in the same pass.
bench-decode ranks:
    cargo build --release
    cargo run --release -p ryzanstein-benches --bin decode_rate -- --world-size {{ranks}}

# Tables of all recorded measurements: docs/results/README.md.
results:
    scripts/render-results

# Lists of the public items of the published crates, in docs/api: for a change of the API that you mean.
api:
    scripts/public-api

# The book, in docs/book.
book:
    mdbook build docs

# How long it takes until a rank that is killed, stopped or stuck is named. FAULT is kill, stop or stuck.
bench-faults fault runs:
    cargo build --release
    cargo run --release -p ryzanstein-benches --bin fault_times -- --fault {{fault}} --runs {{runs}}

# Each fuzz target for so many seconds, with the stable toolchain; needs a C++ compiler.
fuzz seconds:
    scripts/fuzz all {{seconds}}

# Tests of unsafe code under a sanitizer: address or thread.
sanitize which:
    scripts/sanitize {{which}}

# Cuts the network between two nodes, which are network namespaces; needs root. HOW is down or drop.
partition how:
    cargo build --release
    cargo build --release -p ryzanstein-benches --bin fault_times
    scripts/partition target/release {{how}}

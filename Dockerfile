# syntax=docker/dockerfile:1
# ryz for CPUs. Dockerfile.cuda adds NCCL and CUDA's libraries; the program is the same.
#   docker build -t ryz .

FROM rust:1.94-slim-bookworm AS build
WORKDIR /build
COPY . .
RUN --mount=type=cache,target=/usr/local/cargo/registry \
    --mount=type=cache,target=/build/target \
    cargo build --release --locked && install -D --strip target/release/ryz /out/ryz

FROM debian:bookworm-slim
RUN useradd --create-home --uid 10001 ryz
COPY --from=build /out/ryz /usr/local/bin/ryz
# A home that can be written to: compiled kernels are kept there.
USER 10001
WORKDIR /home/ryz
ENTRYPOINT ["ryz"]

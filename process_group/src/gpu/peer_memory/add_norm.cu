// An all-reduce fused with the next operations of a transformer's layer: see vectors.cu.

// The operations after the sum.
struct Norm {
    // The sum is added to it.
    T* residual;
    const float* weight;
    // Elements of a row: whole vectors, at most as many as a cluster has threads.
    u32 columns;
    float epsilon;
    // The type of the residual and of the output, a number as KIND, if the terms of the sum are f32. Otherwise it is T.
    u64 narrow;
};

#if KIND == 0
__device__ __forceinline__ u16 narrowed(u32 x, u32 kind) {
    u16 y;
    if (kind == 2) asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(__uint_as_float(x)));
    else asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(__uint_as_float(x)));
    return y;
}
__device__ __forceinline__ u32 widened(u16 x, u32 kind) {
    float y = __uint_as_float((u32)x << 16);
    if (kind == 2) asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return __float_as_uint(y);
}
// Returns x rounded to the type of the residual.
__device__ __forceinline__ Words rounded(Words x, u32 kind) {
    if (kind != 0)
#pragma unroll
        for (int i = 0; i < 4; i++) x.w[i] = widened(narrowed(x.w[i], kind), kind);
    return x;
}
// Loads and stores vector v in the type of the residual.
template <bool WHOLE> __device__ __forceinline__ Words load_row(const T* from, u32 count, u32 v, bool aligned, u32 kind) {
    if (kind == 0) return load<WHOLE>(from, count, v, aligned);
    const u16* at = (const u16*)from + v * PER;
    u16 y[PER];
    if (WHOLE) asm volatile("ld.global.v4.u16 {%0,%1,%2,%3}, [%4];" : "=h"(y[0]), "=h"(y[1]), "=h"(y[2]), "=h"(y[3]) : "l"(at) : "memory");
    else for (int i = 0; i < PER; i++) y[i] = ((const volatile u16*)at)[i];
    Words x;
#pragma unroll
    for (int i = 0; i < PER; i++) x.w[i] = widened(y[i], kind);
    return x;
}
template <bool WHOLE> __device__ __forceinline__ void store_row(T* to, u32 count, u32 v, const Words& x, bool aligned, u32 kind) {
    if (kind == 0) return store<WHOLE>(to, count, v, x, aligned);
    u16 *at = (u16*)to + v * PER, y[PER];
#pragma unroll
    for (int i = 0; i < PER; i++) y[i] = narrowed(x.w[i], kind);
    if (WHOLE) asm volatile("st.global.v4.u16 [%0], {%1,%2,%3,%4};" :: "l"(at), "h"(y[0]), "h"(y[1]), "h"(y[2]), "h"(y[3]) : "memory");
    else for (int i = 0; i < PER; i++) at[i] = y[i];
}
// Sends a sum in the type of the residual to all peers, and receives one.
__device__ __forceinline__ void push_sum(const Call& call, u64 slot, u64 at, const Words& x, u32 kind) {
    if (kind == 0) return push_to_all(call, slot + at, x);
    u32 y[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        y[i] = narrowed(x.w[2 * i], kind) | (u32)narrowed(x.w[2 * i + 1], kind) << 16;
        if (y[i] == ARMED) y[i] = NOT_ARMED;
    }
#pragma unroll
    for (int d = 1; d < RANKS; d++) {
        const u64 to = call.slots[(RANK + d) % RANKS] + RANK * call.capacity + slot + at / 2;
        asm volatile("st.relaxed.sys.global.v2.u32 [%0], {%1,%2};" :: "l"(to), "r"(y[0]), "r"(y[1]) : "memory");
    }
}
__device__ __forceinline__ Words receive_sum(const Call& call, u64 slot, u64 at, u32 kind) {
    if (kind == 0) return receive<false>(call, slot + at);
    u32 tries = 0, y[2];
    u64 until = 0;
    do {
        asm volatile("ld.relaxed.sys.global.v2.u32 {%0,%1}, [%2];" : "=r"(y[0]), "=r"(y[1]) : "l"(slot + at / 2) : "memory");
    } while ((y[0] == ARMED || y[1] == ARMED) && !gives_up(call, tries, until));
    asm volatile("st.global.v2.u32 [%0], {%1,%1};" :: "l"(slot + at / 2), "r"(ARMED) : "memory");
    Words x;
#pragma unroll
    for (int i = 0; i < 4; i++) x.w[i] = widened((u16)(y[i / 2] >> i % 2 * 16), kind);
    return x;
}
#else
__device__ __forceinline__ Words rounded(const Words& x, u32) { return x; }
__device__ __forceinline__ void push_sum(const Call& call, u64 slot, u64 at, const Words& x, u32) { push_to_all(call, slot + at, x); }
__device__ __forceinline__ Words receive_sum(const Call& call, u64 slot, u64 at, u32) { return receive<false>(call, slot + at); }
template <bool WHOLE> __device__ __forceinline__ Words load_row(const T* from, u32 count, u32 v, bool aligned, u32) {
    return load<WHOLE>(from, count, v, aligned);
}
template <bool WHOLE> __device__ __forceinline__ void store_row(T* to, u32 count, u32 v, const Words& x, bool aligned, u32) {
    store<WHOLE>(to, count, v, x, aligned);
}
#endif

// Before Hopper there are no clusters: each block is one.
#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ u32 cluster_blocks() { u32 n; asm("mov.u32 %0, %cluster_nctaid.x;" : "=r"(n)); return n; }
__device__ __forceinline__ u32 block_in_cluster() { u32 i; asm("mov.u32 %0, %cluster_ctaid.x;" : "=r"(i)); return i; }
__device__ __forceinline__ void tell_cluster() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
__device__ __forceinline__ void wait_for_cluster() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }
// All blocks of a cluster have started when they reach `wait_for_cluster` for the first time, and may use each other's memory.
__device__ __forceinline__ void meet_cluster() { asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory"); }
// Stores into the memory of a block of the cluster, at the position of this block's `to`.
__device__ __forceinline__ void store_in_cluster(float* to, u32 block, float x) {
    u32 here = (u32)__cvta_generic_to_shared(to), there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(block));
    asm volatile("st.shared::cluster.f32 [%0], %1;" :: "r"(there), "f"(x) : "memory");
}
#else
__device__ __forceinline__ u32 cluster_blocks() { return 1; }
__device__ __forceinline__ u32 block_in_cluster() { return 0; }
__device__ __forceinline__ void meet_cluster() {}
__device__ __forceinline__ void tell_cluster() {}
__device__ __forceinline__ void wait_for_cluster() {}
__device__ __forceinline__ void store_in_cluster(float*, u32, float) {}
#endif

__device__ __forceinline__ float sum_of_warp(float x) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffff, x, offset);
    return x;
}

__device__ __forceinline__ void load_weight(float (&weight)[PER], const float* from, bool aligned) {
#pragma unroll
    for (int i = 0; i < PER; i += 4) {
        if (aligned) {
            asm volatile("ld.global.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(weight[i]), "=f"(weight[i + 1]), "=f"(weight[i + 2]), "=f"(weight[i + 3]) : "l"(from + i) : "memory");
        } else {
            for (int j = i; j < i + 4; j++) weight[j] = from[j];
        }
    }
}

// Returns the sum over all threads of a cluster to all of them, in the same order for clusters of any shape. `sums` has one element
// for each warp of the cluster, which no thread reads any more.
__device__ __forceinline__ float sum_of_cluster(float x, float* sums) {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32, blocks = cluster_blocks();
    x = sum_of_warp(x);
    if (blocks == 1) {
        if (lane == 0) sums[warp] = x;
        __syncthreads();
    } else {
        if (lane < blocks) store_in_cluster(sums + block_in_cluster() * warps + warp, lane, x);
        tell_cluster();
        wait_for_cluster();
    }
    float sum = 0.0f;
    for (u32 i = lane; i < blocks * warps; i += 32) sum += ((volatile float*)sums)[i];
    return sum_of_warp(sum);
}

// Sums a thread's vector of each row: every rank sends it to every other.
struct OneShotSum {
    u64 base;
    u32 column, width;
    __device__ __forceinline__ OneShotSum(const Call& call, const Start& s, u32 column, u32 width)
        : base(s.phase() * RANKS * call.capacity), column(column), width(width) {}
    __device__ __forceinline__ u64 at(u32 row) const { return base + (u64)(row * width + column) * 16; }
    __device__ __forceinline__ void push_own(const Call& call, u32 row, const Words& own) const { push_to_all(call, at(row), own); }
    __device__ __forceinline__ Words sum(const Call& call, u32 row, const Words& own, u32) const {
        Words x[RANKS];
        receive_all<false>(call, call.slots[RANK] + at(row), x);
        return sum_of(x, own);
    }
};

// Sums in two steps: each row has an owner, which adds it and sends the sum to all others.
struct TwoShotSum {
    u64 scattered, gathered;
    u32 column, width;
    __device__ __forceinline__ TwoShotSum(const Call& call, const Start& s, u32 column, u32 width)
        : scattered(SCATTERED), gathered(GATHERED), column(column), width(width) {}
    __device__ __forceinline__ u64 at(u32 row) const { return (u64)(row / RANKS * width + column) * 16; }
    __device__ __forceinline__ void push_own(const Call& call, u32 row, const Words& own) const {
        const u32 owner = row % RANKS;
        if (owner != RANK) push(call.slots[owner] + scattered + RANK * call.capacity + at(row), own);
    }
    __device__ __forceinline__ Words sum(const Call& call, u32 row, const Words& own, u32 kind) const {
        const u32 owner = row % RANKS;
        if (owner != RANK) return receive_sum(call, call.slots[RANK] + owner * call.capacity + gathered, at(row), kind);
        Words x[RANKS];
        const bool all = receive_all<false>(call, call.slots[RANK] + scattered + at(row), x);
        const Words sum = to_push(rounded(sum_of(x, own), kind));
        if (all) push_sum(call, gathered, at(row), sum, kind);
        return sum;
    }
};

// A sum; then `residual` += sum, and `out` = residual / sqrt(mean(residual²) + epsilon) × weight, row by row. Each step is rounded
// as in a kernel of its own. A cluster handles a row at a time, and each of its threads a vector. No thread ends before the others
// of its cluster, which store into the memory of its block.
template <bool WHOLE, typename Sum> __device__ __forceinline__ void add_norm_of(const Call& call, const Norm& norm, Start& s) {
    __shared__ float sums[2][128];
    const u32 blocks = cluster_blocks(), width = norm.columns / PER, mine = block_in_cluster() * blockDim.x + threadIdx.x;
    const u32 rows = s.vectors / width, cluster = blockIdx.x / blocks, clusters = gridDim.x / blocks;
    const bool has_vector = mine < width;
    // A block without vectors waits for no peer.
    if (block_in_cluster() * blockDim.x >= width) launch_next();
    Words own;
    float weight[PER];
    if (cluster < rows && has_vector) {
        own = load<WHOLE>(call.in, s.count, cluster * width + mine, s.aligned);
        load_weight(weight, norm.weight + mine * PER, WHOLE);
    }
    const bool pushes = !s.is_given_up();
    const Sum sum(call, s, mine, width);
    for (u32 row = cluster; row < rows && has_vector && pushes; row += clusters) {
        const u32 v = row * width + mine;
        if (row != cluster) own = load<WHOLE>(call.in, s.count, v, s.aligned);
        own = to_push(own);
        sum.push_own(call, row, own);
    }
    next_phase(call);
    if (blocks > 1) wait_for_cluster();
    u32 turn = 0;
    for (u32 row = cluster; row < rows; row += clusters, turn ^= 1) {
        const u32 v = row * width + mine;
        Sums x = {};
        float squares = 0.0f;
        if (has_vector) {
            if (clusters < rows) own = to_push(load<WHOLE>(call.in, s.count, v, s.aligned));
            const Sums before = widen(load_row<WHOLE>(norm.residual, s.count, v, s.aligned, norm.narrow));
            const Sums added = widen(rounded(sum.sum(call, row, own, norm.narrow), norm.narrow));
            if (row + clusters >= rows) launch_next();
            const Words after = rounded(round_once(before + added), norm.narrow);
            store_row<WHOLE>(norm.residual, s.count, v, after, s.aligned, norm.narrow);
            x = widen(after);
#pragma unroll
            for (int e = 0; e < PER; e++) squares = __fmaf_rn(x.f[e], x.f[e], squares);
        }
        const float scale = 1.0f / sqrtf(sum_of_cluster(squares, sums[turn]) / norm.columns + norm.epsilon);
        if (has_vector) {
#pragma unroll
            for (int e = 0; e < PER; e++) x.f[e] = x.f[e] * scale * weight[e];
            store_row<WHOLE>(call.out, s.count, v, round_once(x), s.aligned, norm.narrow);
        }
    }
}

template <typename Sum> __device__ __forceinline__ void add_norm_by(const Call& call, const Norm& norm) {
    if (cluster_blocks() > 1) meet_cluster();
    Start s = start(call);
    s.aligned = s.aligned && (((u64)norm.residual | (u64)norm.weight) & 15) == 0;
    if (__builtin_expect(s.aligned, 1)) add_norm_of<true, Sum>(call, norm, s); else add_norm_of<false, Sum>(call, norm, s);
}

extern "C" __global__ void __launch_bounds__(1024, 1) add_norm(const __grid_constant__ Call call, const __grid_constant__ Norm norm) {
    add_norm_by<OneShotSum>(call, norm);
}

extern "C" __global__ void __launch_bounds__(1024, 1) two_shot_add_norm(const __grid_constant__ Call call, const __grid_constant__ Norm norm) {
    add_norm_by<TwoShotSum>(call, norm);
}

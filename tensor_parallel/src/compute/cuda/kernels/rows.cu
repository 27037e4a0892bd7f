// Operations that treat each element or row on its own. A block has a row or a head, or strides over elements.

// Rows of a table, zeros for ids that are not in it. `ids` has one for each row.
extern "C" __global__ void embed(
    const OTHER* table, u32 first, u32 rows, u32 columns, const u32* ids, ELEMENT* __restrict__ out
) {
    wait_for_previous();
    constexpr int N = least(Wide<ELEMENT>::N, Wide<OTHER>::N);
    u32 row = ids[blockIdx.x] - first;
    bool mine = row < rows;
    const OTHER* from = table + (u64)row * columns;
    ELEMENT* to = out + (u64)blockIdx.x * columns;
    if (columns % N == 0) {
        for (u32 i = threadIdx.x * N; i < columns; i += blockDim.x * N) {
            Pack<OTHER, N> in = {};
            if (mine) in = *(const Pack<OTHER, N>*)(from + i);
            Pack<ELEMENT, N> result;
            for (int e = 0; e < N; e++) result.of[e] = narrow<ELEMENT>(widen(in.of[e]));
            *(Pack<ELEMENT, N>*)(to + i) = result;
        }
        return;
    }
    for (u32 i = threadIdx.x; i < columns; i += blockDim.x) {
        to[i] = narrow<ELEMENT>(mine ? widen(from[i]) : 0.0f);
    }
}

// x += y, where y repeats after `period` elements.
extern "C" __global__ void add(ELEMENT* x, const OTHER* y, u64 count, u64 period) {
    wait_for_previous();
    constexpr int N = least(Wide<ELEMENT>::N, Wide<OTHER>::N);
    u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x, threads = (u64)gridDim.x * blockDim.x;
    if (count % N == 0 && period % N == 0) {
        for (u64 i = thread * N; i < count; i += threads * N) {
            Pack<ELEMENT, N> a = *(Pack<ELEMENT, N>*)(x + i);
            Pack<OTHER, N> b = *(const Pack<OTHER, N>*)(y + (period == count ? i : i % period));
            for (int e = 0; e < N; e++) a.of[e] = narrow<ELEMENT>(widen(a.of[e]) + widen(b.of[e]));
            *(Pack<ELEMENT, N>*)(x + i) = a;
        }
        return;
    }
    for (u64 i = thread; i < count; i += threads) {
        x[i] = narrow<ELEMENT>(widen(x[i]) + widen(y[i % period]));
    }
}

// out = the sum of terms of `length` elements, rounded once. The terms of a tree are added in pairs of neighbours, then the sums of the
// trees one after the other. A tree has `leaves` terms, a power of two of at most LEAVES.
extern "C" __global__ void sum_of_leaves(ELEMENT* __restrict__ out, const float* terms, u64 length, u32 leaves, u32 trees) {
    wait_for_previous();
    u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x, threads = (u64)gridDim.x * blockDim.x;
    for (u64 i = thread; i < length; i += threads) {
        float sum = 0.0f;
        for (u32 t = 0; t < trees; t++) {
            float sums[LEAVES];
            #pragma unroll
            for (u32 l = 0; l < LEAVES; l++) sums[l] = l < leaves ? terms[(u64)(t * leaves + l) * length + i] : 0.0f;
            #pragma unroll
            for (u32 step = 1; step < LEAVES; step *= 2) {
                #pragma unroll
                for (u32 l = 0; l < LEAVES; l += 2 * step) if (step < leaves) sums[l] += sums[l + step];
            }
            sum = t == 0 ? sums[0] : sum + sums[0];
        }
        out[i] = narrow<ELEMENT>(sum);
    }
}

// out = x in another type, rounded once.
extern "C" __global__ void convert(const OTHER* x, ELEMENT* __restrict__ out, u64 count) {
    wait_for_previous();
    u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x, threads = (u64)gridDim.x * blockDim.x;
    for (u64 i = thread; i < count; i += threads) out[i] = narrow<ELEMENT>(widen(x[i]));
}

// silu(gate) × up, where each row of x is gate, then up. Blocks of the grid's second dimension take rows.
extern "C" __global__ void swiglu(const ELEMENT* x, ELEMENT* __restrict__ out, u32 rows, u32 width) {
    wait_for_previous();
    constexpr int N = Wide<ELEMENT>::N;
    u32 thread = blockIdx.x * blockDim.x + threadIdx.x, threads = gridDim.x * blockDim.x;
    for (u32 row = blockIdx.y; row < rows; row += gridDim.y) {
        const ELEMENT *gates = x + (u64)row * 2 * width, *ups = gates + width;
        ELEMENT* to = out + (u64)row * width;
        if (width % N == 0) {
            for (u32 i = thread * N; i < width; i += threads * N) {
                Pack<ELEMENT, N> gate = *(const Pack<ELEMENT, N>*)(gates + i), up = *(const Pack<ELEMENT, N>*)(ups + i);
                for (int e = 0; e < N; e++) gate.of[e] = narrow<ELEMENT>(gated(widen(gate.of[e]), widen(up.of[e])));
                *(Pack<ELEMENT, N>*)(to + i) = gate;
            }
        } else {
            for (u32 i = thread; i < width; i += threads) to[i] = narrow<ELEMENT>(gated(widen(gates[i]), widen(ups[i])));
        }
    }
}

// `kept` columns from `first` on of blocks side by side: [blocks, rows, width] becomes [rows, kept].
extern "C" __global__ void select_columns(
    const ELEMENT* blocks, ELEMENT* __restrict__ out, u64 count, u32 rows, u32 width, u32 first, u32 kept
) {
    wait_for_previous();
    u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x, threads = (u64)gridDim.x * blockDim.x;
    for (u64 i = thread; i < count; i += threads) {
        u64 row = i / kept, column = first + i % kept;
        out[i] = blocks[(column / width * rows + row) * width + column % width];
    }
}

// The norm of a row in vectors of N elements. A warp adds the squares of 32 neighbouring vectors, then those of its next 32; the block adds
// the sums of its warps. The `add_norm.cu` of the process group adds f32 terms in the same order: with invariant numerics, both norms have
// the same bits.
template <int N> __device__ __forceinline__ void norm_of(
    ELEMENT* x, const ELEMENT* y, const OTHER* weight, ELEMENT* __restrict__ out, u32 columns,
    float epsilon, u32 is_settled
) {
    using Vector = Pack<ELEMENT, N>;
    using Weights = Pack<OTHER, N>;
    const u32 at = threadIdx.x * N, stride = blockDim.x * N, of_first_lane = threadIdx.x / 32 * 32 * N;
    auto take = [&](u32 i) {
        Vector a = *(const Vector*)(x + i);
        if (y) {
            const Vector b = *(const Vector*)(y + i);
            for (int e = 0; e < N; e++) a.of[e] = narrow<ELEMENT>(widen(a.of[e]) + widen(b.of[e]));
            *(Vector*)(x + i) = a;
        }
        return a;
    };
    auto squares_of = [](const Vector& a) {
        float sum = 0.0f;
        for (auto& element : a.of) sum = __fmaf_rn(widen(element), widen(element), sum);
        return sum;
    };
    // Usually a thread has one vector: it stays in registers.
    Vector first = {};
    Weights weights = {};
    // Before the wait: the product after this norm then reads its first weights while the kernel before this norm still runs.
    launch_next();
    if (!is_settled) wait_for_previous();
    if (at < columns) weights = *(const Weights*)(weight + at);
    if (is_settled) wait_for_previous();
    if (at < columns) first = take(at);
    float squares = sum_of_warp(squares_of(first));
    for (u32 i = stride; i + of_first_lane < columns; i += stride)
        squares += sum_of_warp(i + at < columns ? squares_of(take(i + at)) : 0.0f);
    const float scale = 1.0f / sqrtf(sum_of_warps(squares) / columns + epsilon);
    auto write = [&](u32 i, Vector a, const Weights& by) {
        for (int e = 0; e < N; e++) a.of[e] = narrow<ELEMENT>(widen(a.of[e]) * scale * widen(by.of[e]));
        *(Vector*)(out + i) = a;
    };
    if (at < columns) write(at, first, weights);
    // If x was written, this thread wrote these elements.
    for (u32 i = at + stride; i < columns; i += stride) write(i, *(const Vector*)(x + i), *(const Weights*)(weight + i));
}

// out = x / sqrt(mean(x²) + epsilon) × weight, after x += y unless y is null. If `is_settled`, no kernel has written the weight. A block
// has a row.
extern "C" __global__ void add_norm(
    ELEMENT* x, const ELEMENT* y, const OTHER* weight, ELEMENT* __restrict__ out, u32 columns,
    float epsilon, u32 is_settled
) {
    constexpr int N = least(Wide<ELEMENT>::N, Wide<OTHER>::N);
    const u64 row = (u64)blockIdx.x * columns;
    if (y) y += row;
    if (columns % N == 0) norm_of<N>(x + row, y, weight, out + row, columns, epsilon, is_settled);
    else norm_of<1>(x + row, y, weight, out + row, columns, epsilon, is_settled);
}

// The norm of each query and key head of a row, in place. A row of `qkv` is `width` long and begins with the query heads, then
// the key heads. A block is one warp; the grid is rows, heads.
extern "C" __global__ void head_norms(
    ELEMENT* qkv, const OTHER* queries, const OTHER* keys, u32 width, u32 head_dim,
    u32 heads, float epsilon
) {
    wait_for_previous();
    ELEMENT* head = qkv + (u64)blockIdx.x * width + (u64)blockIdx.y * head_dim;
    const OTHER* weight = blockIdx.y < heads ? queries : keys;
    float squares = 0.0f;
    for (u32 i = threadIdx.x; i < head_dim; i += 32) squares += widen(head[i]) * widen(head[i]);
    float scale = 1.0f / sqrtf(sum_of_warp(squares) / head_dim + epsilon);
    for (u32 i = threadIdx.x; i < head_dim; i += 32) head[i] = narrow<ELEMENT>(widen(head[i]) * scale * widen(weight[i]));
}

// Sine and cosine of each position's angles. The angle is rounded to f32, as the models' training code does; its sine
// is then exact. The frequencies of a row begin `stride` after those of the row before.
extern "C" __global__ void rotations(
    const float* __restrict__ frequencies, const u32* __restrict__ positions, float2* __restrict__ out, u32 half, u32 stride,
    float amplitude
) {
    wait_for_previous();
    u32 position = positions[blockIdx.x];
    frequencies += (u64)blockIdx.x * stride;
    for (u32 i = threadIdx.x; i < half; i += blockDim.x) {
        double sine, cosine;
        sincos((double)((float)position * frequencies[i]), &sine, &cosine);
        out[(u64)blockIdx.x * half + i] = make_float2((float)sine * amplitude, (float)cosine * amplitude);
    }
}

// The order of logits and their tokens: NaN before all others, then the greatest logit, then the lowest token.
__device__ __forceinline__ u64 order_of(float logit, u32 token) {
    // Zeros of both signs are equal.
    const u32 bits = __float_as_uint(logit + 0.0f);
    const u32 order = logit != logit ? 0xffffffff : bits >> 31 ? ~bits : bits | 0x80000000;
    return (u64)order << 32 | (0xffffffff - token);
}
__device__ __forceinline__ float logit_of(u64 order) {
    const u32 bits = order >> 32;
    return __uint_as_float(bits == 0xffffffff ? 0x7fffffff : bits >> 31 ? bits & 0x7fffffff : ~bits);
}
__device__ __forceinline__ u32 token_of(u64 order) { return 0xffffffff - (u32)order; }
__device__ __forceinline__ u64 first_of_warp(u64 order) {
    for (int offset = 16; offset > 0; offset /= 2) {
        const u64 other = __shfl_xor_sync(0xffffffff, order, offset);
        order = other > order ? other : order;
    }
    return order;
}

// The greatest logit of each part of PART columns of a row and its token, of which the first column has `first`. A row is `width` long,
// and its first `count` columns have tokens. The grid is rows, parts; a block has PART_THREADS threads.
extern "C" __global__ void argmax(const ELEMENT* x, float2* __restrict__ out, u32 width, u32 first, u32 count) {
    constexpr int EACH = PART / PART_THREADS;
    wait_for_previous();
    const u32 begin = blockIdx.y * PART + threadIdx.x;
    const ELEMENT* row = x + (u64)blockIdx.x * width;
    float logits[EACH];
    #pragma unroll
    for (int i = 0; i < EACH; i++) logits[i] = begin + i * PART_THREADS < count ? widen(row[begin + i * PART_THREADS]) : __uint_as_float(0xff800000);
    u64 best = 0;
    #pragma unroll
    for (int i = 0; i < EACH; i++) {
        const u64 order = order_of(logits[i], first + begin + i * PART_THREADS);
        best = order > best ? order : best;
    }
    __shared__ u64 of_warps[PART_THREADS / 32];
    best = first_of_warp(best);
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = best;
    __syncthreads();
    if (threadIdx.x >= 32) return;
    best = first_of_warp(threadIdx.x < PART_THREADS / 32 ? of_warps[threadIdx.x] : 0);
    if (threadIdx.x == 0) out[(u64)blockIdx.x * gridDim.y + blockIdx.y] = make_float2(logit_of(best), (float)token_of(best));
}

// Replaces ids whose highest bit is set: the others are the row of candidates [rows, pairs] that has the token. A block is one warp and
// takes one id.
extern "C" __global__ void choose(const float2* candidates, u32 pairs, u32 rows, u32* ids) {
    wait_for_previous();
    const u32 row = ids[blockIdx.x] ^ 0x80000000;
    if (row >= rows) return;
    u64 best = 0;
    for (u32 i = threadIdx.x; i < pairs; i += 32) {
        const float2 pair = candidates[(u64)row * pairs + i];
        const u64 order = order_of(pair.x, (u32)pair.y);
        best = order > best ? order : best;
    }
    best = first_of_warp(best);
    if (threadIdx.x == 0) ids[blockIdx.x] = token_of(best);
}

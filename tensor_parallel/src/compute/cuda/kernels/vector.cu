// A matrix times one vector: decoding. Bound by memory, so the matrix is read once, in the widest loads, and never
// kept in the L1 cache. Several vectors are multiplied one after the other, where gemm.cu does not apply.
//
// ELEMENT is the type of the vector, OTHER that of the matrix, RESULT that of the product.

#define THREADS 128
// Rows of the matrix a block: they share what is read of the vector. A gate and its up are two.
#define ROWS 2

template <typename T, int N> __device__ __forceinline__ Pack<T, N> stream(const T* from) {
    Pack<T, N> pack;
    if constexpr (sizeof(pack) == 16) {
        u32* words = (u32*)&pack;
        asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
            : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3]) : "l"(from));
    } else {
        pack = *(const Pack<T, N>*)from;
    }
    return pack;
}

// out[n] = matrix[n, k] · x[k] + bias[n]. If `is_gated`, the first half of these are gates, and out[n / 2] = silu(gate) × up. If
// `is_settled`, no kernel has written the matrix, and the first weights are loaded while the previous kernel runs. Each y of the grid
// has a vector, from element `first` of a row of `stride` elements on.
extern "C" __global__ void __launch_bounds__(THREADS) matrix_vector(
    const ELEMENT* __restrict__ x, const OTHER* __restrict__ matrix, const float* __restrict__ bias, RESULT* __restrict__ out,
    u32 n, u32 k, u32 is_gated, u32 is_settled, u32 stride, u64 first
) {
    constexpr int N = least(Wide<ELEMENT>::N, Wide<OTHER>::N);
    constexpr int UNROLL = 4;
    x += (u64)blockIdx.y * stride + first;
    out += (u64)blockIdx.y * (is_gated ? n / ROWS : n);
    u32 rows[ROWS];
    const OTHER* from[ROWS];
    for (int r = 0; r < ROWS; r++) {
        rows[r] = is_gated ? blockIdx.x + r * (n / ROWS) : min(blockIdx.x * ROWS + r, n - 1);
        from[r] = matrix + (u64)rows[r] * k;
    }
    Pack<OTHER, N> weights[UNROLL][ROWS];
    auto load = [&](u32 at) {
        #pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            #pragma unroll
            for (int r = 0; r < ROWS; r++) weights[u][r] = stream<OTHER, N>(from[r] + at + u * THREADS * N);
        }
    };
    u32 i = threadIdx.x * N;
    auto is_whole = [&]() { return k % N == 0 && i + (UNROLL - 1) * THREADS * N < k; };
    if (!is_settled) wait_for_previous();
    if (is_whole()) load(i);
    if (is_settled) wait_for_previous();
    float sums[ROWS] = {};
    while (is_whole()) {
        #pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            Pack<ELEMENT, N> in = *(const Pack<ELEMENT, N>*)(x + i + u * THREADS * N);
            for (int r = 0; r < ROWS; r++) {
                for (int e = 0; e < N; e++) sums[r] += widen(weights[u][r].of[e]) * widen(in.of[e]);
            }
        }
        i += UNROLL * THREADS * N;
        if (is_whole()) load(i);
    }
    if (k % N == 0) {
        for (; i < k; i += THREADS * N) {
            Pack<ELEMENT, N> in = *(const Pack<ELEMENT, N>*)(x + i);
            for (int r = 0; r < ROWS; r++) {
                Pack<OTHER, N> weight = stream<OTHER, N>(from[r] + i);
                for (int e = 0; e < N; e++) sums[r] += widen(weight.of[e]) * widen(in.of[e]);
            }
        }
    } else {
        for (u32 i = threadIdx.x; i < k; i += THREADS) {
            for (int r = 0; r < ROWS; r++) sums[r] += widen(from[r][i]) * widen(x[i]);
        }
    }
    __shared__ float shares[THREADS / 32][ROWS];
    for (int r = 0; r < ROWS; r++) {
        float sum = sum_of_warp(sums[r]);
        if (threadIdx.x % 32 == 0) shares[threadIdx.x / 32][r] = sum;
    }
    __syncthreads();
    if (threadIdx.x != 0) return;
    for (int r = 0; r < ROWS; r++) {
        sums[r] = bias ? bias[rows[r]] : 0.0f;
        for (int w = 0; w < THREADS / 32; w++) sums[r] += shares[w][r];
    }
    if (is_gated) {
        // Rounded as in kernels of their own.
        const float gate = widen(narrow<RESULT>(sums[0])), up = widen(narrow<RESULT>(sums[1]));
        out[blockIdx.x] = narrow<RESULT>(gated(gate, up));
    } else {
        for (int r = 0; r < ROWS; r++) out[rows[r]] = narrow<RESULT>(sums[r]);
    }
}

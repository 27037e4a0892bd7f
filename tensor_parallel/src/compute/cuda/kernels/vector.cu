// A matrix times vectors, one for each blockIdx.y, where the tensor cores of Hopper do not apply. Memory bounds it, so the matrix is read
// in the widest loads.
//
// ELEMENT is the type of the vector, OTHER that of the matrix, RESULT that of the product. A block has ROWS rows of the matrix, 2 or 4,
// which share what is read of the vector.

#define THREADS 128
// Loads of the matrix that a thread has in flight.
#define LOADS 8

// Elements that are still packed: unpacking right after a load would wait for it.
template <typename T, int N> using Packed = Pack<u32, N * sizeof(T) / 4>;
template <typename T, int N> __device__ __forceinline__ Packed<T, N> stream(const T* from) {
    Packed<T, N> pack;
    if constexpr (sizeof(pack) == 16) {
        asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
            : "=r"(pack.of[0]), "=r"(pack.of[1]), "=r"(pack.of[2]), "=r"(pack.of[3]) : "l"(from));
    } else {
        pack = *(const Packed<T, N>*)from;
    }
    return pack;
}

// out[n] = matrix[n, k] · x[k] + bias[n]. If `is_settled`, no kernel has written the matrix, and the first weights are loaded while the
// previous kernel runs. blockIdx.y selects a row of x, of `stride` elements: its vector starts at element `first`.
extern "C" __global__ void __launch_bounds__(THREADS) matrix_vector(
    const ELEMENT* x, const OTHER* matrix, const float* bias, RESULT* __restrict__ out,
    u32 n, u32 k, u32 is_settled, u32 stride, u64 first
) {
    constexpr int N = least(Wide<ELEMENT>::N, Wide<OTHER>::N), UNROLL = LOADS / ROWS;
    constexpr u32 STEP = THREADS * N;
    x += (u64)blockIdx.y * stride + first;
    out += (u64)blockIdx.y * n;
    u32 rows[ROWS];
    const OTHER* from[ROWS];
    for (int r = 0; r < ROWS; r++) {
        rows[r] = min(blockIdx.x * ROWS + r, n - 1);
        from[r] = matrix + (u64)rows[r] * k;
    }
    Packed<OTHER, N> weights[UNROLL][ROWS];
    float sums[ROWS] = {};
    u32 i = threadIdx.x * N;
    auto is_whole = [&]() { return i + (UNROLL - 1) * STEP < k; };
    auto load_step = [&](int u) {
        #pragma unroll
        for (int r = 0; r < ROWS; r++) weights[u][r] = stream<OTHER, N>(from[r] + i + u * STEP);
    };
    auto load = [&]() {
        if (is_whole()) {
            #pragma unroll
            for (int u = 0; u < UNROLL; u++) load_step(u);
        } else {
            #pragma unroll
            for (int u = 0; u < UNROLL - 1; u++) if (i + u * STEP < k) load_step(u);
        }
    };
    auto multiply = [&](int u) {
        const Pack<ELEMENT, N> in = *(const Pack<ELEMENT, N>*)(x + i + u * STEP);
        for (int r = 0; r < ROWS; r++) {
            const Pack<OTHER, N> by = *(const Pack<OTHER, N>*)&weights[u][r];
            for (int e = 0; e < N; e++) sums[r] += widen(by.of[e]) * widen(in.of[e]);
        }
    };
    const bool is_aligned = k % N == 0;
    if (!is_settled) wait_for_previous();
    if (is_aligned) load();
    if (is_settled) wait_for_previous();
    if (is_aligned) {
        while (is_whole()) {
            #pragma unroll
            for (int u = 0; u < UNROLL; u++) multiply(u);
            i += UNROLL * STEP;
            load();
        }
        #pragma unroll
        for (int u = 0; u < UNROLL - 1; u++) if (i + u * STEP < k) multiply(u);
    } else {
        for (i = threadIdx.x; i < k; i += THREADS) {
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
        float sum = bias ? bias[rows[r]] : 0.0f;
        for (int w = 0; w < THREADS / 32; w++) sum += shares[w][r];
        out[rows[r]] = narrow<RESULT>(sum);
    }
}

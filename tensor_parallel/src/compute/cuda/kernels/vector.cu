// A matrix times one vector: decoding. Bound by memory, so the matrix is read once, in the widest loads, and never
// kept in the first cache.
//
// ELEMENT is the type of the vector, OTHER that of the matrix, RESULT that of the product.

#define THREADS 128
// Rows of the matrix a block: they share what is read of the vector.
#define ROWS 2

template <typename T, int N> __device__ __forceinline__ Pack<T, N> stream(const T* from) {
    Pack<T, N> pack;
    if constexpr (sizeof(pack) == 16) {
        u32* words = (u32*)&pack;
        asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
            : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3]) : "l"(from));
    } else {
        pack = *(const Pack<T, N>*)from;
    }
    return pack;
}

// out[n] = matrix[n, k] · x[k] + bias[n]
extern "C" __global__ void __launch_bounds__(THREADS) matrix_vector(
    const ELEMENT* __restrict__ x, const OTHER* __restrict__ matrix, const float* __restrict__ bias, RESULT* __restrict__ out,
    u32 n, u32 k
) {
    constexpr int N = least(Wide<ELEMENT>::N, Wide<OTHER>::N);
    constexpr int UNROLL = 4;
    u32 row = blockIdx.x * ROWS;
    const OTHER* from[ROWS];
    for (int r = 0; r < ROWS; r++) from[r] = matrix + (u64)(row + r < n ? row + r : n - 1) * k;
    float sums[ROWS] = {};
    if (k % N == 0) {
        u32 i = threadIdx.x * N;
        for (; i + (UNROLL - 1) * THREADS * N < k; i += UNROLL * THREADS * N) {
            Pack<OTHER, N> weights[UNROLL][ROWS];
            #pragma unroll
            for (int u = 0; u < UNROLL; u++) {
                #pragma unroll
                for (int r = 0; r < ROWS; r++) weights[u][r] = stream<OTHER, N>(from[r] + i + u * THREADS * N);
            }
            #pragma unroll
            for (int u = 0; u < UNROLL; u++) {
                Pack<ELEMENT, N> in = *(const Pack<ELEMENT, N>*)(x + i + u * THREADS * N);
                for (int r = 0; r < ROWS; r++) {
                    for (int e = 0; e < N; e++) sums[r] += widen(weights[u][r].of[e]) * widen(in.of[e]);
                }
            }
        }
        for (; i < k; i += THREADS * N) {
            Pack<ELEMENT, N> in = *(const Pack<ELEMENT, N>*)(x + i);
            for (int r = 0; r < ROWS; r++) {
                Pack<OTHER, N> weights = stream<OTHER, N>(from[r] + i);
                for (int e = 0; e < N; e++) sums[r] += widen(weights.of[e]) * widen(in.of[e]);
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
    if (threadIdx.x < ROWS && row + threadIdx.x < n) {
        float sum = 0.0f;
        for (int w = 0; w < THREADS / 32; w++) sum += shares[w][threadIdx.x];
        if (bias) sum += bias[row + threadIdx.x];
        out[row + threadIdx.x] = narrow<RESULT>(sum);
    }
}

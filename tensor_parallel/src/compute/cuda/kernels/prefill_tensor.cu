// Attention of many new positions on tensor cores, for 16-bit types and heads of a multiple of 16 elements up to 128.
// Compiled behind attention.cu, whose names it uses.
//
// Keys and values are exact in their type. Queries and shares are f32, and go in as two 16-bit numbers each, the nearest
// one and the nearest to what is left, so that nothing is rounded to 16 bits before the result is.

#ifdef TENSOR

#define TENSOR_THREADS 128
// A warp has 16 queries: it reads each tile of keys and values whole.
constexpr int TENSOR_QUERIES = TENSOR_THREADS / 32 * 16;
constexpr int TENSOR_KEYS = 64;
// Rows in shared memory are longer by 16 bytes, so that eight of them lie in different banks.
constexpr int PITCH = HEAD_DIM + 8;

__device__ __forceinline__ u32 pair(ELEMENT low, ELEMENT high) { return (u32)low.bits | (u32)high.bits << 16; }

// Two numbers, and what their nearest 16-bit numbers leave of them.
__device__ __forceinline__ void split(float a, float b, u32& near, u32& rest) {
    ELEMENT first = narrow<ELEMENT>(a), second = narrow<ELEMENT>(b);
    near = pair(first, second);
    rest = pair(narrow<ELEMENT>(a - widen(first)), narrow<ELEMENT>(b - widen(second)));
}

// c[16, 8] += a[16, 16] · b[16, 8], each warp's lanes holding their parts.
__device__ __forceinline__ void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, bf16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, f16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four 8 × 8 matrices from shared memory; lane i names row i % 8 of matrix i / 8.
__device__ __forceinline__ void load_matrices(u32 (&m)[4], const ELEMENT* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
        : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"((u32)__cvta_generic_to_shared(row)) : "memory");
}
__device__ __forceinline__ void load_transposed(u32 (&m)[4], const ELEMENT* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
        : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"((u32)__cvta_generic_to_shared(row)) : "memory");
}

// As `prefill` in prefill.cu, in whose place it stands.
extern "C" __global__ void __launch_bounds__(TENSOR_THREADS) prefill(
    const ELEMENT* __restrict__ qkv, const float2* __restrict__ rotations, const u32* __restrict__ batch,
    const ELEMENT* __restrict__ keys, const ELEMENT* __restrict__ values, ELEMENT* __restrict__ out, Shape shape
) {
    alignas(16) __shared__ ELEMENT key_tile[TENSOR_KEYS][PITCH], value_tile[TENSOR_KEYS][PITCH];
    u32 position = batch[0], sequence = batch[shape.rows], kv_head = blockIdx.y, count = shape.rows * GROUP;
    // The tiles with most to do come first.
    u32 tile = (gridDim.x - 1 - blockIdx.x) * TENSOR_QUERIES;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, column = lane % 4 * 2;
    // A lane has parts of two queries, eight apart.
    u32 index[2], seen_to[2], seen_from[2];
    #pragma unroll
    for (int r = 0; r < 2; r++) {
        index[r] = tile + warp * 16 + lane / 4 + 8 * r;
        seen_to[r] = position + min(index[r], count - 1) / GROUP + 1;
        seen_from[r] = first_seen(shape, seen_to[r]);
    }
    u32 query[HEAD_DIM / 16][4], rest[HEAD_DIM / 16][4];
    #pragma unroll
    for (int r = 0; r < 2; r++) {
        u32 row = min(index[r], count - 1) / GROUP, head = kv_head * GROUP + min(index[r], count - 1) % GROUP;
        const ELEMENT* from = qkv + row * row_length(shape) + (u64)head * HEAD_DIM;
        const float2* rotation = rotations + (u64)row * HALF;
        #pragma unroll
        for (int k = 0; k < HEAD_DIM / 16; k++) {
            #pragma unroll
            for (int h = 0; h < 2; h++) {
                int at = k * 16 + h * 8 + column;
                float a = rotated(from, rotation, at) * shape.scale, b = rotated(from, rotation, at + 1) * shape.scale;
                split(a, b, query[k][2 * h + r], rest[k][2 * h + r]);
            }
        }
    }

    float top[2] = {-1e30f, -1e30f}, weight[2] = {}, sums[HEAD_DIM / 8][4] = {};
    u32 from = first_seen(shape, position + tile / GROUP + 1);
    u32 to = position + min(tile + TENSOR_QUERIES - 1, count - 1) / GROUP + 1;
    const u64 base = base_of(shape, sequence, kv_head);
    for (u32 start = from; start < to; start += TENSOR_KEYS) {
        __syncthreads();
        constexpr int PACKS = HEAD_DIM / 8;
        for (int i = threadIdx.x; i < TENSOR_KEYS * PACKS; i += TENSOR_THREADS) {
            u32 at = start + i / PACKS;
            Pack<ELEMENT, 8> key = {}, value = {};
            if (at < to) {
                key = *(const Pack<ELEMENT, 8>*)(keys + base + (u64)at * HEAD_DIM + i % PACKS * 8);
                value = *(const Pack<ELEMENT, 8>*)(values + base + (u64)at * HEAD_DIM + i % PACKS * 8);
            }
            *(Pack<ELEMENT, 8>*)&key_tile[i / PACKS][i % PACKS * 8] = key;
            *(Pack<ELEMENT, 8>*)&value_tile[i / PACKS][i % PACKS * 8] = value;
        }
        __syncthreads();

        float score[TENSOR_KEYS / 8][4] = {};
        #pragma unroll
        for (int k = 0; k < HEAD_DIM / 16; k++) {
            #pragma unroll
            for (int n = 0; n < TENSOR_KEYS / 16; n++) {
                // Keys n·16 to +7 and +8 to +15, each with elements k·16 to +7 and +8 to +15.
                u32 b[4];
                load_matrices(b, &key_tile[n * 16 + lane / 16 * 8 + lane % 8][k * 16 + lane / 8 % 2 * 8]);
                #pragma unroll
                for (int h = 0; h < 2; h++) {
                    multiply(score[2 * n + h], query[k], b[2 * h], b[2 * h + 1], ELEMENT());
                    multiply(score[2 * n + h], rest[k], b[2 * h], b[2 * h + 1], ELEMENT());
                }
            }
        }

        float high[2] = {top[0], top[1]}, all[2] = {};
        #pragma unroll
        for (int n = 0; n < TENSOR_KEYS / 8; n++) {
            #pragma unroll
            for (int e = 0; e < 4; e++) {
                u32 at = start + n * 8 + column + e % 2;
                if (at < seen_from[e / 2] || at >= seen_to[e / 2]) score[n][e] = UNSEEN;
                high[e / 2] = fmaxf(high[e / 2], score[n][e]);
            }
        }
        float keep[2];
        #pragma unroll
        for (int r = 0; r < 2; r++) {
            high[r] = fmaxf(high[r], __shfl_xor_sync(0xffffffff, high[r], 1));
            high[r] = fmaxf(high[r], __shfl_xor_sync(0xffffffff, high[r], 2));
            keep[r] = expf(top[r] - high[r]);
            top[r] = high[r];
        }
        #pragma unroll
        for (int n = 0; n < TENSOR_KEYS / 8; n++) {
            #pragma unroll
            for (int e = 0; e < 4; e++) {
                score[n][e] = expf(score[n][e] - high[e / 2]);
                all[e / 2] += score[n][e];
            }
        }
        // A lane's own share of the sum of weights; the lanes of a query are added at the end.
        #pragma unroll
        for (int r = 0; r < 2; r++) weight[r] = weight[r] * keep[r] + all[r];
        #pragma unroll
        for (int n = 0; n < HEAD_DIM / 8; n++) {
            #pragma unroll
            for (int e = 0; e < 4; e++) sums[n][e] *= keep[e / 2];
        }
        #pragma unroll
        for (int k = 0; k < TENSOR_KEYS / 16; k++) {
            // The scores of two tiles lie as the next product wants its first operand.
            u32 share[4], left[4];
            #pragma unroll
            for (int h = 0; h < 2; h++) {
                #pragma unroll
                for (int r = 0; r < 2; r++) {
                    split(score[2 * k + h][2 * r], score[2 * k + h][2 * r + 1], share[2 * h + r], left[2 * h + r]);
                }
            }
            #pragma unroll
            for (int n = 0; n < HEAD_DIM / 16; n++) {
                // Positions k·16 to +7 and +8 to +15, each with elements n·16 to +7, then the same with +8 to +15.
                u32 b[4];
                load_transposed(b, &value_tile[k * 16 + lane / 8 % 2 * 8 + lane % 8][n * 16 + lane / 16 * 8]);
                #pragma unroll
                for (int h = 0; h < 2; h++) {
                    multiply(sums[2 * n + h], share, b[2 * h], b[2 * h + 1], ELEMENT());
                    multiply(sums[2 * n + h], left, b[2 * h], b[2 * h + 1], ELEMENT());
                }
            }
        }
    }

    #pragma unroll
    for (int r = 0; r < 2; r++) {
        weight[r] += __shfl_xor_sync(0xffffffff, weight[r], 1);
        weight[r] += __shfl_xor_sync(0xffffffff, weight[r], 2);
        if (index[r] >= count) continue;
        u32 row = index[r] / GROUP, head = kv_head * GROUP + index[r] % GROUP;
        ELEMENT* result = out + ((u64)row * GROUP * shape.kv_heads + head) * HEAD_DIM;
        #pragma unroll
        for (int n = 0; n < HEAD_DIM / 8; n++) {
            float a = sums[n][2 * r] / weight[r], b = sums[n][2 * r + 1] / weight[r];
            *(u32*)(result + n * 8 + column) = pair(narrow<ELEMENT>(a), narrow<ELEMENT>(b));
        }
    }
}

#endif

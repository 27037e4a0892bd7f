// How a block of `decode` attends to positions in the cache, on tensor cores: for 16-bit types and heads of 64 or 128 elements.
// Compiled behind attention.cu and mma.cu, whose names it uses.
//
// Queries and weights are rounded to 16 bits, sums are f32. Scores are keys × queries, so that a tile's rows are positions and its
// columns heads; the result is values × weights. Each lane loads whole packs of 8 elements into the registers in which the
// products take them: the order of elements in a sum over them is free, if both operands have the same.

#ifdef DECODE_MMA

// Positions of a warp's tile, and of a block's.
#define TILE 16
constexpr int POSITIONS_A_STEP = WARPS * TILE;
// Parts of a head that the four lanes of a row of keys load at once, and the eight lanes of a column of values.
constexpr int KEY_PARTS = HEAD_DIM / 32, VALUE_PARTS = HEAD_DIM / 64;
// Eight elements.
typedef Pack<u32, 4> Words;

__device__ __forceinline__ float query_at(const Heads& mine, int head, int at) {
    return widen(narrow<ELEMENT>(rotated(mine.queries + head * HEAD_DIM, mine.rotation, at)));
}

// Prefetches a warp's first tile into the second-level cache. Nothing is read, so this may come before the wait.
__device__ __forceinline__ void prefetch(const ELEMENT* keys, const ELEMENT* values, u32 from, u32 to) {
    constexpr int LINE = 64;
    u32 at = from + threadIdx.x / 32 * TILE;
    for (int i = threadIdx.x % 32; i < TILE * HEAD_DIM / LINE; i += 32) {
        if (at + i * LINE / HEAD_DIM >= to) return;
        const u64 element = (u64)at * HEAD_DIM + i * LINE;
        asm volatile("prefetch.global.L2 [%0];" :: "l"(keys + element));
        asm volatile("prefetch.global.L2 [%0];" :: "l"(values + element));
    }
}

__device__ __forceinline__ Words load_pack(const ELEMENT* from, bool is_there) {
    Words pack = {};
    if (is_there) {
        asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
            : "=r"(pack.of[0]), "=r"(pack.of[1]), "=r"(pack.of[2]), "=r"(pack.of[3]) : "l"(from));
    }
    return pack;
}

// The transpose of an 8 × 8 matrix, of which each lane has two elements of a row.
__device__ __forceinline__ u32 transposed(u32 pair) {
    u32 result;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
    return result;
}

// Attends to the positions `from..to` of the cache, and leaves the partial results of each warp.
__device__ __forceinline__ void attend(
    const Heads& mine, const ELEMENT* keys, const ELEMENT* values, u32 from, u32 to, WarpPartials& partials
) {
    const int warp = threadIdx.x / 32, row = threadIdx.x % 32 / 4, column = threadIdx.x % 4;
    // Elements 32 q + 8 column to + 7 of query `row`, as pairs.
    u32 query[KEY_PARTS][4];
    #pragma unroll
    for (int q = 0; q < KEY_PARTS / 2; q++) {
        constexpr int OTHER = KEY_PARTS / 2;
        const ELEMENT* at = mine.queries + min(row, HEADS - 1) * HEAD_DIM + q * 32 + column * 8;
        const Pack<ELEMENT, 8> low = *(const Pack<ELEMENT, 8>*)at, high = *(const Pack<ELEMENT, 8>*)(at + HALF);
        const float2* rotation = mine.rotation + q * 32 + column * 8;
        #pragma unroll
        for (int p = 0; p < 4; p++) {
            float turned[2][2];
            #pragma unroll
            for (int e = 0; e < 2; e++) {
                const float2 by = rotation[2 * p + e];
                const float a = widen(low.of[2 * p + e]), b = widen(high.of[2 * p + e]);
                turned[0][e] = a * by.y - b * by.x;
                turned[1][e] = b * by.y + a * by.x;
            }
            query[q][p] = row < HEADS ? rounded_pair(turned[0][0], turned[0][1]) : 0;
            query[q + OTHER][p] = row < HEADS ? rounded_pair(turned[1][0], turned[1][1]) : 0;
        }
    }

    // Of heads 2 column and 2 column + 1. Finite, so that differences of two of them are numbers.
    float top[2] = {-1e30f, -1e30f}, weight[2] = {};
    // Tile 4 h + p has elements 64 h + 8 row + 2 p in its upper half, the next ones in its lower.
    float sums[VALUE_PARTS * 16] = {};
    for (u32 start = from + warp * TILE; start < to; start += POSITIONS_A_STEP) {
        Words key[2][KEY_PARTS], value[4][VALUE_PARTS];
        #pragma unroll
        for (int r = 0; r < 2; r++) {
            const u32 at = start + row + 8 * r;
            #pragma unroll
            for (int q = 0; q < KEY_PARTS; q++) key[r][q] = load_pack(keys + (u64)at * HEAD_DIM + q * 32 + column * 8, at < to);
        }
        #pragma unroll
        for (int r = 0; r < 4; r++) {
            const u32 at = start + 2 * column + r % 2 + r / 2 * 8;
            #pragma unroll
            for (int h = 0; h < VALUE_PARTS; h++) value[r][h] = load_pack(values + (u64)at * HEAD_DIM + h * 64 + row * 8, at < to);
        }

        // Positions `row` and `row` + 8, of both heads. Two sums, so that a product need not wait for the one before.
        float score[8] = {};
        #pragma unroll
        for (int q = 0; q < KEY_PARTS; q++) {
            #pragma unroll
            for (int p = 0; p < 4; p += 2) {
                const u32 a[4] = {key[0][q].of[p], key[1][q].of[p], key[0][q].of[p + 1], key[1][q].of[p + 1]};
                multiply(score, p / 2, a, query[q][p], query[q][p + 1]);
            }
        }
        float keep[2];
        #pragma unroll
        for (int e = 0; e < 2; e++) {
            score[e] = start + row < to ? (score[e] + score[4 + e]) * mine.scale : UNSEEN;
            score[2 + e] = start + row + 8 < to ? (score[2 + e] + score[6 + e]) * mine.scale : UNSEEN;
            float high = fmaxf(top[e], fmaxf(score[e], score[2 + e]));
            #pragma unroll
            for (int offset = 4; offset < 32; offset *= 2) high = fmaxf(high, __shfl_xor_sync(0xffffffff, high, offset));
            keep[e] = power_of_2(top[e] - high);
            top[e] = high;
            score[e] = power_of_2(score[e] - high);
            score[2 + e] = power_of_2(score[2 + e] - high);
            weight[e] = weight[e] * keep[e] + score[e] + score[2 + e];
        }
        const u32 upper = transposed(rounded_pair(score[0], score[1])), lower = transposed(rounded_pair(score[2], score[3]));
        #pragma unroll
        for (int i = 0; i < VALUE_PARTS * 16; i++) sums[i] *= keep[i % 2];
        #pragma unroll
        for (int h = 0; h < VALUE_PARTS; h++) {
            #pragma unroll
            for (int p = 0; p < 4; p++) {
                u32 a[4];
                #pragma unroll
                for (int r = 0; r < 2; r++) {
                    a[2 * r] = __byte_perm(value[2 * r][h].of[p], value[2 * r + 1][h].of[p], 0x5410);
                    a[2 * r + 1] = __byte_perm(value[2 * r][h].of[p], value[2 * r + 1][h].of[p], 0x7632);
                }
                multiply(sums, 4 * h + p, a, upper, lower);
            }
        }
    }

    #pragma unroll
    for (int e = 0; e < 2; e++) {
        const int head = 2 * column + e;
        #pragma unroll
        for (int offset = 4; offset < 32; offset *= 2) weight[e] += __shfl_xor_sync(0xffffffff, weight[e], offset);
        if (head >= HEADS) continue;
        if (row == 0) {
            partials.top[warp][head] = top[e];
            partials.weight[warp][head] = weight[e];
        }
        #pragma unroll
        for (int h = 0; h < VALUE_PARTS; h++) {
            #pragma unroll
            for (int i = 0; i < 8; i++) partials.sum[warp][head][h * 64 + row * 8 + i] = sums[(4 * h + i / 2) * 4 + i % 2 * 2 + e];
        }
    }
}

#endif

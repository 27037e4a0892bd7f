// Attention of many new positions on the tensor cores of Hopper, after FlashAttention-3 (arXiv:2407.08608): a warp group multiplies
// 64 queries with a whole tile of keys that lies in shared memory, and computes weights while it adds values. For 16-bit types and heads
// of 64 or 128 elements.
// Compiled behind attention.cu, wgmma.cu and softmax.cu, whose names it uses.
//
// Queries and weights are rounded to 16 bits, sums are f32.

#ifdef WGMMA

// A warp group has 64 queries.
constexpr int WARP_GROUP_QUERIES = 64;
// A tile of keys is square, so that both products have the same shape.
constexpr int WGMMA_KEYS = HEAD_DIM;
static_assert(PAGE_SIZE % WGMMA_KEYS == 0, "a tile lies within a page");
constexpr int COLUMNS = HEAD_DIM / 64;
constexpr u32 QUERY_BYTES = WARP_GROUP_QUERIES * 128, KEY_BYTES = WGMMA_KEYS * 128;
constexpr u32 TILE_BYTES = COLUMNS * KEY_BYTES;

// c[64, HEAD_DIM] = a[64, 16] · b[16, HEAD_DIM], a in registers, b in shared memory; added to c if ACCUMULATES.
template <bool ACCUMULATES> __device__ __forceinline__ void multiply_values(Tile& c, const u32 (&a)[4], u64 b) {
    asm volatile(MULTIPLY REGISTERS_TEXT : SUMS(c) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(ACCUMULATES));
}
// Part `part` of 16 bytes of a row, in columns of `column_bytes`.
__device__ __forceinline__ u32 place(u32 row, u32 part, u32 column_bytes) {
    return part / 8 * column_bytes + row * 128 + (part % 8 ^ row % 8) * 16;
}

// Copies the first `count` positions of a tile; zeros behind them. A thread copies the same part of some rows, whose swizzle is the same.
template <int THREADS> __device__ __forceinline__ void load_tile(u32 tile, const ELEMENT* from, u32 count) {
    constexpr int PARTS = HEAD_DIM / 8, ROWS = THREADS / PARTS;
    static_assert(ROWS % 8 == 0 && WGMMA_KEYS % ROWS == 0, "rows a round");
    const u32 row = threadIdx.x / PARTS, part = threadIdx.x % PARTS;
    const u32 into = tile + place(row, part, KEY_BYTES);
    from += row * HEAD_DIM + part * 8;
    if (count >= WGMMA_KEYS) {
        #pragma unroll
        for (int i = 0; i < WGMMA_KEYS / ROWS; i++) {
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(into + i * ROWS * 128), "l"(from + i * ROWS * HEAD_DIM) : "memory");
        }
        return;
    }
    #pragma unroll
    for (int i = 0; i < WGMMA_KEYS / ROWS; i++) {
        // Where nothing is read, the address is that of the first row.
        const bool there = row + i * ROWS < count;
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
            :: "r"(into + i * ROWS * 128), "l"(from + (there ? i * ROWS * HEAD_DIM : -(int)row * HEAD_DIM)), "r"(there ? 16 : 0) : "memory");
    }
}
__device__ __forceinline__ void end_loads() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits for all loads but the latest groups. Products read shared memory by another way than stores, hence the fence.
template <int LATEST = 0> __device__ __forceinline__ void wait_for_loads() {
    asm volatile("cp.async.wait_group %0;" :: "n"(LATEST) : "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
}

// score = queries · keysᵀ
__device__ __forceinline__ void score_tile(Tile& score, u32 queries, u32 keys) {
    #pragma unroll
    for (int k = 0; k < HEAD_DIM / 16; k++) {
        const u32 in_row = k % 4 * 32;
        multiply_rows(score, operand(queries + k / 4 * QUERY_BYTES + in_row, 0), operand(keys + k / 4 * KEY_BYTES + in_row, 0), k > 0);
    }
    end_products();
}
typedef u32 Weights[WGMMA_KEYS / 16][4];
// weighted = weights · values
__device__ __forceinline__ void weigh_values(Tile& weighted, const Weights& weights, u32 values) {
    multiply_values<false>(weighted, weights[0], operand(values, KEY_BYTES));
    #pragma unroll
    for (int k = 1; k < WGMMA_KEYS / 16; k++) multiply_values<true>(weighted, weights[k], operand(values + k * 16 * 128, KEY_BYTES));
    end_products();
}

// Part `part` of a head, eight elements, and the part half a head away, rotated and rounded.
struct Rotated {
    u32 low[4], high[4];

    __device__ __forceinline__ Rotated(const ELEMENT* head, const float2* rotation, u32 part) {
        const Pack<ELEMENT, 8> a = *(const Pack<ELEMENT, 8>*)(head + part * 8), b = *(const Pack<ELEMENT, 8>*)(head + part * 8 + HALF);
        float first[8], second[8];
        #pragma unroll
        for (int e = 0; e < 8; e++) {
            const float2 by = rotation[part * 8 + e];
            first[e] = turned(widen(a.of[e]), -widen(b.of[e]), by);
            second[e] = turned(widen(b.of[e]), widen(a.of[e]), by);
        }
        #pragma unroll
        for (int e = 0; e < 4; e++) {
            low[e] = rounded_pair(first[2 * e], first[2 * e + 1]);
            high[e] = rounded_pair(second[2 * e], second[2 * e + 1]);
        }
    }
};
// Pairs of parts of a head.
constexpr int PAIRS = HEAD_DIM / 16;
__device__ __forceinline__ void store_part(u32 at, const u32 (&words)[4]) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" :: "r"(at), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]) : "memory");
}
// Rotates the queries from `first` on into shared memory. From `count` on they are zeros.
template <int THREADS> __device__ __forceinline__ void load_queries(
    u32 to, const ELEMENT* qkv, const float2* rotations, const Shape& shape, u32 kv_head, u32 first, u32 count
) {
    for (int i = threadIdx.x; i < THREADS / 128 * WARP_GROUP_QUERIES * PAIRS; i += THREADS) {
        const u32 query = i / PAIRS, part = i % PAIRS, index = first + query, row = query % WARP_GROUP_QUERIES;
        const u32 at = to + query / WARP_GROUP_QUERIES * COLUMNS * QUERY_BYTES;
        const u32 low = at + place(row, part, QUERY_BYTES), high = at + place(row, part + PAIRS, QUERY_BYTES);
        if (index < count) {
            const u32 head = kv_head * GROUP + index % GROUP;
            const Rotated both(qkv + index / GROUP * row_length(shape) + (u64)head * HEAD_DIM, rotations + (u64)(index / GROUP) * HALF, part);
            store_part(low, both.low);
            store_part(high, both.high);
        } else {
            const u32 zeros[4] = {};
            store_part(low, zeros);
            store_part(high, zeros);
        }
    }
}

#define PREFILL_THREADS 256
// As `prefill` in prefill.cu, in whose place it stands.
extern "C" __global__ void __launch_bounds__(PREFILL_THREADS) prefill(
    const ELEMENT* qkv, const float2* rotations, const u32* __restrict__ batch,
    const ELEMENT* keys, const ELEMENT* values, ELEMENT* __restrict__ out, float*, u32*, Shape shape
) {
    wait_for_previous();
    extern __shared__ unsigned char memory[];
    constexpr int GROUPS = PREFILL_THREADS / 128, QUERIES = GROUPS * WARP_GROUP_QUERIES;
    const u32 queries = ((u32)__cvta_generic_to_shared(memory) + 1023) / 1024 * 1024;
    // Two tiles of keys, then two of values.
    const u32 key_tiles = queries + GROUPS * COLUMNS * QUERY_BYTES, value_tiles = key_tiles + 2 * TILE_BYTES;
    const RunOf run(shape, qkv, rotations, batch, out);
    const u32 position = run.position, kv_head = run.kv_head, count = shape.run * GROUP;
    // The tiles with most to do come first.
    const u32 tile = (gridDim.x - 1 - blockIdx.x) * QUERIES;
    const u32 from = first_seen(shape, position + tile / GROUP + 1) / WGMMA_KEYS * WGMMA_KEYS;
    const u32 to = position + min(tile + QUERIES - 1, count - 1) / GROUP + 1;
    load_tile<PREFILL_THREADS>(key_tiles, keys + run.pages.at(from), to - from);
    end_loads();
    load_queries<PREFILL_THREADS>(queries, run.qkv, run.rotations, shape, kv_head, tile, count);

    const int group = threadIdx.x / 128;
    const u32 my_queries = queries + group * COLUMNS * QUERY_BYTES;
    Queries mine(shape, tile + group * WARP_GROUP_QUERIES + threadIdx.x / 32 % 4 * 16, count, position);
    Tile sums = {}, weighted, score;
    Softmax of_tile[2], of_next[2];
    Weights weights;
    wait_for_loads();
    if (from + WGMMA_KEYS < to) {
        load_tile<PREFILL_THREADS>(key_tiles + TILE_BYTES, keys + run.pages.at(from + WGMMA_KEYS), to - from - WGMMA_KEYS);
    }
    load_tile<PREFILL_THREADS>(value_tiles, values + run.pages.at(from), to - from);
    end_loads();
    begin_products();
    score_tile(score, my_queries, key_tiles);
    wait_for_all(score);
    mine.weigh(score, from, of_tile);
    mine.round(weights, score);
    u32 turn = 1;
    // The values of a tile are added while the weights of the next one are computed.
    for (u32 start = from + WGMMA_KEYS; start < to; start += WGMMA_KEYS, turn ^= 1) {
        wait_for_loads();
        if (start + WGMMA_KEYS < to) {
            const u64 next = run.pages.at(start + WGMMA_KEYS);
            load_tile<PREFILL_THREADS>(key_tiles + (turn ^ 1) * TILE_BYTES, keys + next, to - start - WGMMA_KEYS);
        }
        load_tile<PREFILL_THREADS>(value_tiles + turn * TILE_BYTES, values + run.pages.at(start), to - start);
        end_loads();
        begin_products();
        score_tile(score, my_queries, key_tiles + turn * TILE_BYTES);
        weigh_values(weighted, weights, value_tiles + (turn ^ 1) * TILE_BYTES);
        wait_for_all_but_one(score);
        mine.weigh(score, start, of_next);
        wait_for_all(weighted);
        mine.add(sums, weighted, of_tile);
        mine.round(weights, score);
        of_tile[0] = of_next[0];
        of_tile[1] = of_next[1];
    }
    wait_for_loads();
    begin_products();
    weigh_values(weighted, weights, value_tiles + (turn ^ 1) * TILE_BYTES);
    wait_for_all(weighted);
    mine.add(sums, weighted, of_tile);
    mine.store(sums, run.out, shape, kv_head, count);
}

#endif

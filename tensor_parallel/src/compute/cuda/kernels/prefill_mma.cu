// Attention of new positions on tensor cores, for 16-bit types and heads of a multiple of 16 elements up to 128.
// Compiled behind attention.cu, mma.cu and softmax.cu, whose names it uses.
//
// Queries and weights are rounded to 16 bits, sums are f32.

#ifdef MMA

#define TENSOR_THREADS 128
// A warp has 16 queries: it reads each tile of keys and values whole.
constexpr int TENSOR_QUERIES = TENSOR_THREADS / 32 * 16;
constexpr int TENSOR_KEYS = 64;
static_assert(PAGE_SIZE % TENSOR_KEYS == 0, "a tile lies within a page");
// Rows in shared memory are longer by 16 bytes, so that eight of them lie in different banks.
constexpr int PITCH = HEAD_DIM + 8;

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
    const ELEMENT* qkv, const float2* rotations, const u32* __restrict__ batch,
    const ELEMENT* keys, const ELEMENT* values, ELEMENT* __restrict__ out, float* partial, u32* arrivals, Shape shape
) {
    wait_for_previous();
    alignas(16) __shared__ ELEMENT key_tile[TENSOR_KEYS][PITCH], value_tile[TENSOR_KEYS][PITCH];
    const RunOf run(shape, qkv, rotations, batch, out);
    qkv = run.qkv;
    rotations = run.rotations;
    out = run.out;
    u32 position = run.position, kv_head = run.kv_head, count = shape.run * GROUP;
    // The tiles with most to do come first.
    const u32 split = blockIdx.x % shape.splits, tile = (gridDim.x - 1 - blockIdx.x) / shape.splits * TENSOR_QUERIES;
    const u32 from = first_seen(shape, position + tile / GROUP + 1) / TENSOR_KEYS;
    const u32 to = position + min(tile + TENSOR_QUERIES - 1, count - 1) / GROUP + 1;
    const u32 tiles = ceil_div(to, TENSOR_KEYS) - from, blocks = min(shape.splits, tiles);
    if (split >= blocks) return;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Queries mine(shape, tile + warp * 16, count, position);
    u32 query[HEAD_DIM / 16][4];
    #pragma unroll
    for (int r = 0; r < 2; r++) {
        u32 index = min(mine.index[r], count - 1), row = index / GROUP, head = kv_head * GROUP + index % GROUP;
        const ELEMENT* from = qkv + row * row_length(shape) + (u64)head * HEAD_DIM;
        const float2* rotation = rotations + (u64)row * HALF;
        #pragma unroll
        for (int k = 0; k < HEAD_DIM / 16; k++) {
            #pragma unroll
            for (int h = 0; h < 2; h++) {
                int at = k * 16 + h * 8 + mine.column;
                query[k][2 * h + r] = rounded_pair(rotated(from, rotation, at), rotated(from, rotation, at + 1));
            }
        }
    }

    float sums[HEAD_DIM / 2] = {};
    u32 weights[TENSOR_KEYS / 16][4];
    const Splits splits(partial, shape, run.row, kv_head);
    const bool leaves_tiles = blocks > 1 && shape.results > shape.splits;
    for (u32 t = split; t < tiles; t += shape.splits) {
        const u32 start = (from + t) * TENSOR_KEYS;
        const u64 offset = run.pages.at(start);
        __syncthreads();
        constexpr int PACKS = HEAD_DIM / 8;
        for (int i = threadIdx.x; i < TENSOR_KEYS * PACKS; i += TENSOR_THREADS) {
            u32 at = start + i / PACKS;
            Pack<ELEMENT, 8> key = {}, value = {};
            if (at < to) {
                key = *(const Pack<ELEMENT, 8>*)(keys + offset + i * 8);
                value = *(const Pack<ELEMENT, 8>*)(values + offset + i * 8);
            }
            *(Pack<ELEMENT, 8>*)&key_tile[i / PACKS][i % PACKS * 8] = key;
            *(Pack<ELEMENT, 8>*)&value_tile[i / PACKS][i % PACKS * 8] = value;
        }
        __syncthreads();

        float score[TENSOR_KEYS / 2] = {};
        #pragma unroll
        for (int k = 0; k < HEAD_DIM / 16; k++) {
            #pragma unroll
            for (int n = 0; n < TENSOR_KEYS / 16; n++) {
                // Keys n·16 to +7 and +8 to +15, each with elements k·16 to +7 and +8 to +15.
                u32 b[4];
                load_matrices(b, &key_tile[n * 16 + lane / 16 * 8 + lane % 8][k * 16 + lane / 8 % 2 * 8]);
                #pragma unroll
                for (int h = 0; h < 2; h++) multiply(score, 2 * n + h, query[k], b[2 * h], b[2 * h + 1]);
            }
        }

        Softmax of_tile[2];
        mine.weigh(score, start, of_tile);
        mine.round(weights, score);
        float weighted[HEAD_DIM / 2] = {};
        #pragma unroll
        for (int k = 0; k < TENSOR_KEYS / 16; k++) {
            #pragma unroll
            for (int n = 0; n < HEAD_DIM / 16; n++) {
                // Positions k·16 to +7 and +8 to +15, each with elements n·16 to +7, then the same with +8 to +15.
                u32 b[4];
                load_transposed(b, &value_tile[k * 16 + lane / 8 % 2 * 8 + lane % 8][n * 16 + lane / 16 * 8]);
                #pragma unroll
                for (int h = 0; h < 2; h++) multiply(weighted, 2 * n + h, weights[k], b[2 * h], b[2 * h + 1]);
            }
        }
        if (leaves_tiles) mine.leave(splits, t, weighted, of_tile);
        else mine.add(sums, weighted, of_tile);
    }
    if (blocks == 1) {
        mine.store(sums, out, shape, kv_head, count);
        return;
    }
    if (!leaves_tiles) mine.leave(splits, split, sums, mine.all);
    if (!Splits::are_complete(arrivals, shape, blocks)) return;
    splits.add(out + (u64)kv_head * GROUP * HEAD_DIM, tile, min(tile + TENSOR_QUERIES, GROUP), leaves_tiles ? tiles : blocks, mine.scale);
}

#endif

// Attention of new positions, without tensor cores. Compiled behind attention.cu and softmax.cu, whose names it uses;
// prefill_mma.cu or prefill_wgmma.cu takes its place where there are tensor cores for the type and head.

#if !defined(MMA) && !defined(WGMMA)

#define PREFILL_THREADS 128
// Queries and keys a tile, so that it fits the shared memory that every block may have.
constexpr int KEYS = HEAD_DIM > 128 ? 16 : 32, PREFILL_QUERIES = KEYS, DECODE_QUERIES = 8;
static_assert(PAGE_SIZE % KEYS == 0, "a tile lies within a page");
constexpr int MY_KEYS = KEYS / 16;
constexpr int MY_ELEMENTS = ceil_div(HEAD_DIM, 16);
// Elements that are loaded or multiplied at once; rows are this much longer, so that sixteen of them lie in different banks.
constexpr int STEP = HEAD_DIM % 4 == 0 ? 4 : 2;
constexpr int LENGTH = HEAD_DIM + STEP;

// A query is one head of one row; all heads of a group are in one tile, so that they share what is read of keys and values. The new
// positions are in the cache already. Tiles of keys begin at multiples of their length, so that a row does not depend on the others of its
// run. The blocks of a tile of queries take every `splits`-th tile of keys.
template <int QUERIES> __device__ __forceinline__ void attend(
    const ELEMENT* qkv, const float2* rotations, const u32* __restrict__ batch,
    const ELEMENT* keys, const ELEMENT* values, ELEMENT* __restrict__ out, float* partial, u32* arrivals, Shape shape
) {
    // Sixteen threads share these queries, and stripe over keys and elements.
    constexpr int MINE = QUERIES / 8;
    wait_for_previous();
    __shared__ alignas(16) float query[QUERIES][LENGTH], tile[KEYS][LENGTH];
    __shared__ float shares[QUERIES][KEYS + 1];
    const RunOf run(shape, qkv, rotations, batch, out);
    qkv = run.qkv;
    rotations = run.rotations;
    out = run.out;
    u32 position = run.position, kv_head = run.kv_head, count = shape.run * GROUP;
    // The tiles with most to do come first.
    const u32 split = blockIdx.x % shape.splits, first = (gridDim.x - 1 - blockIdx.x) / shape.splits * QUERIES;
    const u32 from = first_seen(shape, position + first / GROUP + 1) / KEYS * KEYS;
    const u32 to = position + min(first + QUERIES - 1, count - 1) / GROUP + 1;
    const u32 blocks = min(shape.splits, ceil_div(to - from, KEYS));
    if (split >= blocks) return;
    for (int i = threadIdx.x; i < QUERIES * HEAD_DIM; i += PREFILL_THREADS) {
        u32 index = first + i / HEAD_DIM;
        float value = 0.0f;
        if (index < count) {
            u32 row = index / GROUP, head = kv_head * GROUP + index % GROUP;
            const ELEMENT* from = qkv + row * row_length(shape) + (u64)head * HEAD_DIM;
            value = rotated(from, rotations + (u64)row * HALF, i % HEAD_DIM) * shape.scale;
        }
        query[i / HEAD_DIM][i % HEAD_DIM] = value;
    }

    int team = threadIdx.x / 16, lane = threadIdx.x % 16;
    // A warp has two teams.
    const bool has_queries = first + team / 2 * 2 * MINE < count;
    u32 seen_to[MINE], seen_from[MINE];
    float top[MINE], weight[MINE] = {}, sums[MINE][MY_ELEMENTS] = {};
    #pragma unroll
    for (int m = 0; m < MINE; m++) {
        u32 index = min(first + team * MINE + m, count - 1);
        seen_to[m] = position + index / GROUP + 1;
        seen_from[m] = first_seen(shape, seen_to[m]);
        top[m] = LOWEST;
    }
    for (u32 start = from + split * KEYS; start < to; start += shape.splits * KEYS) {
        const u64 offset = run.pages.at(start);
        auto load = [&](const ELEMENT* from) {
            __syncthreads();
            #pragma unroll 4
            for (int i = threadIdx.x * STEP; i < KEYS * HEAD_DIM; i += PREFILL_THREADS * STEP) {
                Pack<ELEMENT, STEP> elements = {};
                if (start + i / HEAD_DIM < to) elements = *(const Pack<ELEMENT, STEP>*)(from + offset + i);
                Pack<float, STEP> wide;
                #pragma unroll
                for (int s = 0; s < STEP; s++) wide.of[s] = widen(elements.of[s]);
                *(Pack<float, STEP>*)&tile[i / HEAD_DIM][i % HEAD_DIM] = wide;
            }
            __syncthreads();
        };
        load(keys);
        if (has_queries) {
            float score[MINE][MY_KEYS] = {};
            #pragma unroll 4
            for (int e = 0; e < HEAD_DIM; e += STEP) {
                Pack<float, STEP> q[MINE], k[MY_KEYS];
                #pragma unroll
                for (int m = 0; m < MINE; m++) q[m] = *(Pack<float, STEP>*)&query[team * MINE + m][e];
                #pragma unroll
                for (int n = 0; n < MY_KEYS; n++) k[n] = *(Pack<float, STEP>*)&tile[lane + 16 * n][e];
                #pragma unroll
                for (int m = 0; m < MINE; m++) {
                    #pragma unroll
                    for (int n = 0; n < MY_KEYS; n++) {
                        #pragma unroll
                        for (int s = 0; s < STEP; s++) score[m][n] += q[m].of[s] * k[n].of[s];
                    }
                }
            }
            #pragma unroll
            for (int m = 0; m < MINE; m++) {
                float high = top[m];
                #pragma unroll
                for (int n = 0; n < MY_KEYS; n++) {
                    u32 at = start + lane + 16 * n;
                    if (at < seen_from[m] || at >= seen_to[m]) score[m][n] = UNSEEN;
                    high = fmaxf(high, score[m][n]);
                }
                #pragma unroll
                for (int offset = 8; offset > 0; offset /= 2) high = fmaxf(high, __shfl_xor_sync(0xffffffff, high, offset));
                float keep = expf(top[m] - high), all = 0.0f;
                top[m] = high;
                #pragma unroll
                for (int n = 0; n < MY_KEYS; n++) {
                    float share = expf(score[m][n] - high);
                    shares[team * MINE + m][lane + 16 * n] = share;
                    all += share;
                }
                #pragma unroll
                for (int offset = 8; offset > 0; offset /= 2) all += __shfl_xor_sync(0xffffffff, all, offset);
                weight[m] = weight[m] * keep + all;
                #pragma unroll
                for (int e = 0; e < MY_ELEMENTS; e++) sums[m][e] *= keep;
            }
        }
        load(values);
        #pragma unroll 4
        for (int n = 0; has_queries && n < KEYS; n++) {
            float share[MINE];
            #pragma unroll
            for (int m = 0; m < MINE; m++) share[m] = shares[team * MINE + m][n];
            #pragma unroll
            for (int e = 0; e < MY_ELEMENTS; e++) {
                int at = lane + 16 * e;
                float value = at < HEAD_DIM ? tile[n][at] : 0.0f;
                #pragma unroll
                for (int m = 0; m < MINE; m++) sums[m][e] += share[m] * value;
            }
        }
    }
    const Splits splits(partial, shape, run.row, kv_head);
    #pragma unroll
    for (int m = 0; m < MINE; m++) {
        u32 index = first + team * MINE + m;
        if (index >= count) continue;
        if (blocks > 1) {
            const u64 result = (u64)split * GROUP + index;
            #pragma unroll
            for (int e = 0; e < MY_ELEMENTS; e++) {
                if (lane + 16 * e < HEAD_DIM) splits.values[result * HEAD_DIM + lane + 16 * e] = sums[m][e];
            }
            if (lane == 0) splits.softmax[result] = {top[m], weight[m]};
            continue;
        }
        u32 row = index / GROUP, head = kv_head * GROUP + index % GROUP;
        ELEMENT* result = out + ((u64)row * GROUP * shape.kv_heads + head) * HEAD_DIM;
        #pragma unroll
        for (int e = 0; e < MY_ELEMENTS; e++) {
            int at = lane + 16 * e;
            if (at < HEAD_DIM) result[at] = narrow<ELEMENT>(sums[m][e] / weight[m]);
        }
    }
    if (blocks == 1 || !Splits::are_complete(arrivals, shape, blocks)) return;
    splits.add(out + (u64)kv_head * GROUP * HEAD_DIM, first, min(first + QUERIES, GROUP), blocks, LOG2_E);
}

extern "C" __global__ void __launch_bounds__(PREFILL_THREADS, 4) prefill(
    const ELEMENT* qkv, const float2* rotations, const u32* __restrict__ batch,
    const ELEMENT* keys, const ELEMENT* values, ELEMENT* __restrict__ out, float* partial, u32* arrivals, Shape shape
) {
    attend<PREFILL_QUERIES>(qkv, rotations, batch, keys, values, out, partial, arrivals, shape);
}
// One row of each of some sequences.
extern "C" __global__ void __launch_bounds__(PREFILL_THREADS, 4) decode(
    const ELEMENT* qkv, const float2* rotations, const u32* __restrict__ batch,
    const ELEMENT* keys, const ELEMENT* values, ELEMENT* __restrict__ out, float* partial, u32* arrivals, Shape shape
) {
    attend<DECODE_QUERIES>(qkv, rotations, batch, keys, values, out, partial, arrivals, shape);
}

#endif

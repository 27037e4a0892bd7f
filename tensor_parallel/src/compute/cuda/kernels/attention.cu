// Attention with a KV cache. HEAD_DIM is the length of a head, GROUP how many query heads share a key/value head.
//
// A row of `qkv` is the query heads, the key heads, then the value heads. The cache is
// [sequences, kv_heads, capacity, HEAD_DIM]. Queries are rotated when they are read and stay f32; keys are rotated and
// rounded when they enter the cache. `batch` is the position of each row, then its sequence: a recorded launch can be
// repeated for every later position, and for other sequences.

constexpr int HALF = HEAD_DIM / 2;
// The score of a position that a query does not see: its weight is zero.
#define UNSEEN (__int_as_float(0xff800000))

struct Shape {
    u32 rows, kv_heads, capacity;
    // How many positions a query sees, its own included; all when zero.
    u32 window;
    float scale;
};

__device__ __forceinline__ u64 row_length(const Shape& shape) { return (u64)(GROUP + 2) * shape.kv_heads * HEAD_DIM; }

__device__ __forceinline__ u32 first_seen(const Shape& shape, u32 seen_to) {
    return shape.window != 0 && seen_to > shape.window ? seen_to - shape.window : 0;
}

// Element `at` of a head after rotation: it is paired with the element half a head away.
__device__ __forceinline__ float rotated(const ELEMENT* head, const float2* rotation, int at) {
    if (at < HALF) return widen(head[at]) * rotation[at].y - widen(head[at + HALF]) * rotation[at].x;
    return widen(head[at]) * rotation[at - HALF].y + widen(head[at - HALF]) * rotation[at - HALF].x;
}

// Where a sequence's keys or values of one head begin in the cache.
__device__ __forceinline__ u64 base_of(const Shape& shape, u32 sequence, u32 kv_head) {
    return ((u64)sequence * shape.kv_heads + kv_head) * shape.capacity * HEAD_DIM;
}

// Puts one position's key and value of one head into the cache.
__device__ __forceinline__ void append_one(
    const ELEMENT* row, const float2* rotation, ELEMENT* keys, ELEMENT* values, const Shape& shape, u32 kv_head, u32 sequence,
    u32 position
) {
    const ELEMENT* key = row + (u64)(GROUP * shape.kv_heads + kv_head) * HEAD_DIM;
    const ELEMENT* value = key + (u64)shape.kv_heads * HEAD_DIM;
    u64 at = base_of(shape, sequence, kv_head) + (u64)position * HEAD_DIM;
    for (int i = threadIdx.x; i < HEAD_DIM; i += blockDim.x) {
        keys[at + i] = narrow<ELEMENT>(rotated(key, rotation, i));
        values[at + i] = value[i];
    }
}

// Grid: rows, key/value heads.
extern "C" __global__ void append(
    const ELEMENT* __restrict__ qkv, const float2* __restrict__ rotations, const u32* __restrict__ batch,
    ELEMENT* __restrict__ keys, ELEMENT* __restrict__ values, Shape shape
) {
    u32 row = blockIdx.x;
    append_one(
        qkv + row * row_length(shape), rotations + (u64)row * HALF, keys, values, shape, blockIdx.y, batch[shape.rows + row], batch[row]
    );
}

// ---- one new position of each of some sequences ---------------------------------------------------------------------

#define DECODE_THREADS 128
constexpr int WARPS = DECODE_THREADS / 32;
// Query heads a block: a larger group takes several blocks, which read the same keys and values through the cache.
__host__ __device__ constexpr int heads_a_block(int group, int most) {
    return group % most == 0 ? most : heads_a_block(group, most - 1);
}
constexpr int HEADS = heads_a_block(GROUP, HEAD_DIM > 128 ? 4 : 8);
// Elements a lane loads at once, lanes that share a position, and loads a lane.
__host__ __device__ constexpr int widest(int most) { return HEAD_DIM % most == 0 ? most : widest(most / 2); }
constexpr int VECTOR = widest(Wide<ELEMENT>::N);
constexpr int LANES = least(32, power_of_two(HEAD_DIM / VECTOR));
constexpr int PIECES = ceil_div(HEAD_DIM / VECTOR, LANES);
constexpr int TEAMS = DECODE_THREADS / LANES;
// Positions that a team has in flight.
constexpr int AHEAD = HEADS * PIECES > 4 ? 2 : 4;
// What a split leaves for the combination: the weighted sum, the greatest score and the sum of weights.
constexpr int LEFT = HEAD_DIM + 2;
// Fewer positions than this are not worth a split of their own. The caller launches no more than MOST_SPLITS.
constexpr int FEWEST = greatest(64, TEAMS * AHEAD);
constexpr int MOST_SPLITS = 64;

// Grid: splits of the positions; blocks of query heads, of one row after the other. Splits are shared out on the device, as the number of positions
// grows from launch to launch. The split that has the new position puts it into the cache; the last one to finish
// combines all. `arrivals` is zero before and after.
extern "C" __global__ void __launch_bounds__(DECODE_THREADS) decode(
    const ELEMENT* __restrict__ qkv, const float2* __restrict__ rotation, const u32* __restrict__ batch, ELEMENT* keys,
    ELEMENT* values, ELEMENT* __restrict__ out, float* partial, u32* arrivals, Shape shape
) {
    u32 across = shape.kv_heads * (GROUP / HEADS), row = blockIdx.y / across, heads = GROUP * shape.kv_heads;
    qkv += row * row_length(shape);
    rotation += (u64)row * HALF;
    out += (u64)row * heads * HEAD_DIM;
    u32 sequence = batch[shape.rows + row], position = batch[row], seen_to = position + 1, seen_from = first_seen(shape, seen_to);
    u32 seen = seen_to - seen_from;
    u32 share = max((seen + gridDim.x - 1) / gridDim.x, (u32)FEWEST);
    u32 splits = (seen + share - 1) / share;
    if (blockIdx.x >= splits) return;
    u32 from = seen_from + blockIdx.x * share, to = min(from + share, seen_to);
    u32 head = blockIdx.y % across * HEADS, kv_head = head / GROUP;
    if (to == seen_to) {
        append_one(qkv, rotation, keys, values, shape, kv_head, sequence, position);
        __syncthreads();
    }

    int lane = threadIdx.x % LANES, team = threadIdx.x / LANES;
    float query[HEADS][PIECES][VECTOR];
    #pragma unroll
    for (int h = 0; h < HEADS; h++) {
        #pragma unroll
        for (int p = 0; p < PIECES; p++) {
            #pragma unroll
            for (int e = 0; e < VECTOR; e++) {
                int at = (p * LANES + lane) * VECTOR + e;
                bool there = at < HEAD_DIM;
                query[h][p][e] = there ? rotated(qkv + (u64)(head + h) * HEAD_DIM, rotation, at) * shape.scale : 0.0f;
            }
        }
    }

    // Finite, so that differences of two of them are numbers.
    float top[HEADS], weight[HEADS] = {}, sums[HEADS][PIECES][VECTOR] = {};
    #pragma unroll
    for (int h = 0; h < HEADS; h++) top[h] = -1e30f;
    const u64 base = base_of(shape, sequence, kv_head);
    for (u32 block = from; block < to; block += TEAMS * AHEAD) {
        Pack<ELEMENT, VECTOR> key[AHEAD][PIECES], value[AHEAD][PIECES];
        #pragma unroll
        for (int a = 0; a < AHEAD; a++) {
            u32 at = block + a * TEAMS + team;
            #pragma unroll
            for (int p = 0; p < PIECES; p++) {
                int element = (p * LANES + lane) * VECTOR;
                key[a][p] = {};
                value[a][p] = {};
                if (at < to && element < HEAD_DIM) {
                    key[a][p] = *(const Pack<ELEMENT, VECTOR>*)(keys + base + (u64)at * HEAD_DIM + element);
                    value[a][p] = *(const Pack<ELEMENT, VECTOR>*)(values + base + (u64)at * HEAD_DIM + element);
                }
            }
        }
        #pragma unroll
        for (int h = 0; h < HEADS; h++) {
            float score[AHEAD], high = top[h];
            #pragma unroll
            for (int a = 0; a < AHEAD; a++) {
                float product = 0.0f;
                #pragma unroll
                for (int p = 0; p < PIECES; p++) {
                    #pragma unroll
                    for (int e = 0; e < VECTOR; e++) product += query[h][p][e] * widen(key[a][p].of[e]);
                }
                #pragma unroll
                for (int offset = LANES / 2; offset > 0; offset /= 2) {
                    product += __shfl_xor_sync(0xffffffff, product, offset);
                }
                score[a] = block + a * TEAMS + team < to ? product : UNSEEN;
                high = fmaxf(high, score[a]);
            }
            float keep = expf(top[h] - high);
            top[h] = high;
            weight[h] *= keep;
            #pragma unroll
            for (int p = 0; p < PIECES; p++) {
                #pragma unroll
                for (int e = 0; e < VECTOR; e++) sums[h][p][e] *= keep;
            }
            #pragma unroll
            for (int a = 0; a < AHEAD; a++) {
                float share_of = expf(score[a] - high);
                weight[h] += share_of;
                #pragma unroll
                for (int p = 0; p < PIECES; p++) {
                    #pragma unroll
                    for (int e = 0; e < VECTOR; e++) sums[h][p][e] += share_of * widen(value[a][p].of[e]);
                }
            }
        }
    }

    // The teams of the block become one: first those of a warp, then the warps.
    __shared__ float tops[WARPS][HEADS], weights[WARPS][HEADS], shares[WARPS][HEADS][HEAD_DIM];
    int warp = threadIdx.x / 32;
    #pragma unroll
    for (int h = 0; h < HEADS; h++) {
        float high = top[h];
        #pragma unroll
        for (int offset = LANES; offset < 32; offset *= 2) high = fmaxf(high, __shfl_xor_sync(0xffffffff, high, offset));
        float keep = expf(top[h] - high);
        weight[h] *= keep;
        #pragma unroll
        for (int offset = LANES; offset < 32; offset *= 2) weight[h] += __shfl_xor_sync(0xffffffff, weight[h], offset);
        #pragma unroll
        for (int p = 0; p < PIECES; p++) {
            #pragma unroll
            for (int e = 0; e < VECTOR; e++) {
                float sum = sums[h][p][e] * keep;
                #pragma unroll
                for (int offset = LANES; offset < 32; offset *= 2) sum += __shfl_xor_sync(0xffffffff, sum, offset);
                int at = (p * LANES + lane) * VECTOR + e;
                if (threadIdx.x % 32 < LANES && at < HEAD_DIM) shares[warp][h][at] = sum;
            }
        }
        if (threadIdx.x % 32 == 0) {
            tops[warp][h] = high;
            weights[warp][h] = weight[h];
        }
    }
    __syncthreads();
    const u64 place = (u64)gridDim.x * LEFT;
    partial += (u64)row * heads * place;
    for (int i = threadIdx.x; i < HEADS * HEAD_DIM; i += DECODE_THREADS) {
        int h = i / HEAD_DIM, at = i % HEAD_DIM;
        float high = tops[0][h];
        for (int w = 1; w < WARPS; w++) high = fmaxf(high, tops[w][h]);
        float sum = 0.0f, all = 0.0f;
        for (int w = 0; w < WARPS; w++) {
            float keep = expf(tops[w][h] - high);
            sum += keep * shares[w][h][at];
            all += keep * weights[w][h];
        }
        if (splits == 1) {
            out[(u64)(head + h) * HEAD_DIM + at] = narrow<ELEMENT>(sum / all);
            continue;
        }
        float* left = partial + (head + h) * place + (u64)blockIdx.x * LEFT;
        left[at] = sum;
        if (at == 0) {
            left[HEAD_DIM] = high;
            left[HEAD_DIM + 1] = all;
        }
    }
    if (splits == 1) return;

    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        last = atomicAdd(arrivals + blockIdx.y, 1) == splits - 1;
        if (last) arrivals[blockIdx.y] = 0;
    }
    __syncthreads();
    if (!last) return;
    __threadfence();
    // How much each split counts, one warp a head, then the sums with many loads in flight.
    __shared__ float counts[HEADS][MOST_SPLITS], totals[HEADS];
    for (int h = warp; h < HEADS; h += WARPS) {
        const float* left = partial + (head + h) * place + HEAD_DIM;
        float high = -1e30f, all = 0.0f;
        for (u32 s = threadIdx.x % 32; s < splits; s += 32) high = fmaxf(high, __ldcg(left + s * LEFT));
        for (int offset = 16; offset > 0; offset /= 2) high = fmaxf(high, __shfl_xor_sync(0xffffffff, high, offset));
        for (u32 s = threadIdx.x % 32; s < splits; s += 32) {
            float keep = expf(__ldcg(left + s * LEFT) - high);
            counts[h][s] = keep;
            all += keep * __ldcg(left + s * LEFT + 1);
        }
        all = sum_of_warp(all);
        if (threadIdx.x % 32 == 0) totals[h] = all;
    }
    __syncthreads();
    constexpr int OUTPUTS = ceil_div(HEADS * HEAD_DIM, DECODE_THREADS);
    float sum[OUTPUTS] = {};
    #pragma unroll 4
    for (u32 s = 0; s < splits; s++) {
        #pragma unroll
        for (int o = 0; o < OUTPUTS; o++) {
            int i = threadIdx.x + o * DECODE_THREADS, h = i / HEAD_DIM;
            if (h < HEADS) sum[o] += counts[h][s] * __ldcg(partial + (head + h) * place + s * LEFT + i % HEAD_DIM);
        }
    }
    #pragma unroll
    for (int o = 0; o < OUTPUTS; o++) {
        int i = threadIdx.x + o * DECODE_THREADS, h = i / HEAD_DIM;
        if (h < HEADS) out[(u64)head * HEAD_DIM + i] = narrow<ELEMENT>(sum[o] / totals[h]);
    }
}

// ---- many new positions, without tensor cores; see prefill.cu ------------------------------------------------------

#ifndef TENSOR

#define PREFILL_THREADS 128
// Queries and keys a tile, so that it fits the shared memory that every block may have.
constexpr int QUERIES = HEAD_DIM > 128 ? 16 : 32;
constexpr int KEYS = HEAD_DIM > 128 ? 16 : 32;
// Sixteen threads share QUERIES / 8 queries, and stripe over keys and elements.
constexpr int MINE = QUERIES / 8;
constexpr int MY_KEYS = KEYS / 16;
constexpr int MY_ELEMENTS = ceil_div(HEAD_DIM, 16);
// Elements of a dot product at once; rows are this much longer, so that sixteen of them lie in different banks.
constexpr int STEP = HEAD_DIM % 4 == 0 ? 4 : 2;
constexpr int LENGTH = HEAD_DIM + STEP;

// Grid: tiles of queries, key/value heads. A query is one head of one row; all heads of a group are in one tile, so
// that they share what is read of keys and values. The new positions are in the cache already.
extern "C" __global__ void __launch_bounds__(PREFILL_THREADS) prefill(
    const ELEMENT* __restrict__ qkv, const float2* __restrict__ rotations, const u32* __restrict__ batch,
    const ELEMENT* __restrict__ keys, const ELEMENT* __restrict__ values, ELEMENT* __restrict__ out, Shape shape
) {
    __shared__ alignas(16) float query[QUERIES][LENGTH], tile[KEYS][LENGTH];
    __shared__ float shares[QUERIES][KEYS + 1];
    u32 position = batch[0], sequence = batch[shape.rows], kv_head = blockIdx.y, count = shape.rows * GROUP;
    // The tiles with most to do come first.
    u32 first = (gridDim.x - 1 - blockIdx.x) * QUERIES;
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
    u32 seen_to[MINE], seen_from[MINE];
    float top[MINE], weight[MINE] = {}, sums[MINE][MY_ELEMENTS] = {};
    #pragma unroll
    for (int m = 0; m < MINE; m++) {
        u32 index = min(first + team * MINE + m, count - 1);
        seen_to[m] = position + index / GROUP + 1;
        seen_from[m] = first_seen(shape, seen_to[m]);
        top[m] = -1e30f;
    }
    u32 from = first_seen(shape, position + first / GROUP + 1);
    u32 to = position + min(first + QUERIES - 1, count - 1) / GROUP + 1;
    const u64 base = base_of(shape, sequence, kv_head);
    for (u32 start = from; start < to; start += KEYS) {
        __syncthreads();
        for (int i = threadIdx.x; i < KEYS * HEAD_DIM; i += PREFILL_THREADS) {
            u32 at = start + i / HEAD_DIM;
            tile[i / HEAD_DIM][i % HEAD_DIM] = at < to ? widen(keys[base + (u64)at * HEAD_DIM + i % HEAD_DIM]) : 0.0f;
        }
        __syncthreads();
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
        __syncthreads();
        for (int i = threadIdx.x; i < KEYS * HEAD_DIM; i += PREFILL_THREADS) {
            u32 at = start + i / HEAD_DIM;
            tile[i / HEAD_DIM][i % HEAD_DIM] = at < to ? widen(values[base + (u64)at * HEAD_DIM + i % HEAD_DIM]) : 0.0f;
        }
        __syncthreads();
        #pragma unroll 4
        for (int n = 0; n < KEYS; n++) {
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
    #pragma unroll
    for (int m = 0; m < MINE; m++) {
        u32 index = first + team * MINE + m;
        if (index >= count) continue;
        u32 row = index / GROUP, head = kv_head * GROUP + index % GROUP;
        ELEMENT* result = out + ((u64)row * GROUP * shape.kv_heads + head) * HEAD_DIM;
        #pragma unroll
        for (int e = 0; e < MY_ELEMENTS; e++) {
            int at = lane + 16 * e;
            if (at < HEAD_DIM) result[at] = narrow<ELEMENT>(sums[m][e] / weight[m]);
        }
    }
}

#endif

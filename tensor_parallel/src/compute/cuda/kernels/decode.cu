// Attention of one new position of each of some sequences, without tensor cores. Compiled behind attention.cu, whose names it uses;
// decode_wgmma.cu takes its place where there are tensor cores of Hopper for the type and head.

#ifndef WGMMA

#define DECODE_THREADS 128
constexpr int WARPS = DECODE_THREADS / 32;
// Query heads a block: a larger group takes several blocks, which read the same keys and values through the cache.
__host__ __device__ constexpr int heads_a_block(int group, int most) {
    return group % most == 0 ? most : heads_a_block(group, most - 1);
}
constexpr int HEADS = heads_a_block(GROUP, HEAD_DIM > 128 ? 4 : 8);

// The query heads of a block. `scale` includes log2 e: the weight of a key is 2^(query · key · scale).
struct Heads {
    const ELEMENT* queries;
    const float2* rotation;
    float scale;
};

// Partial results of each warp of a block by head: the greatest score, the sum of weights and the weighted sum of values. The last
// entry is that of the new position.
struct WarpPartials {
    float top[WARPS + 1][HEADS], weight[WARPS + 1][HEADS], sum[WARPS + 1][HEADS][HEAD_DIM];
};

// Elements a lane loads at once, lanes that share a position, and loads a lane.
__host__ __device__ constexpr int widest(int most) { return HEAD_DIM % most == 0 ? most : widest(most / 2); }
constexpr int VECTOR = widest(Wide<ELEMENT>::N);
constexpr int LANES = least(32, power_of_two(HEAD_DIM / VECTOR));
constexpr int PIECES = ceil_div(HEAD_DIM / VECTOR, LANES);
constexpr int TEAMS = DECODE_THREADS / LANES;
// Positions that a team has in flight.
constexpr int AHEAD = HEADS * PIECES > 4 ? 2 : 4;
// Positions that a block has in flight.
constexpr int POSITIONS_A_STEP = TEAMS * AHEAD;

__device__ __forceinline__ float query_at(const Heads& mine, int head, int at) {
    return rotated(mine.queries + head * HEAD_DIM, mine.rotation, at);
}

// Attends to the positions `from..to` of the cache, and leaves the partial results of each warp.
__device__ __forceinline__ void attend(
    const Heads& mine, const Pages& pages, const ELEMENT* keys, const ELEMENT* values, u32 from, u32 to, WarpPartials& partials
) {
    int lane = threadIdx.x % LANES, team = threadIdx.x / LANES;
    float query[HEADS][PIECES][VECTOR];
    #pragma unroll
    for (int h = 0; h < HEADS; h++) {
        #pragma unroll
        for (int p = 0; p < PIECES; p++) {
            #pragma unroll
            for (int e = 0; e < VECTOR; e++) {
                int at = (p * LANES + lane) * VECTOR + e;
                query[h][p][e] = at < HEAD_DIM ? query_at(mine, h, at) * mine.scale : 0.0f;
            }
        }
    }

    // Finite, so that differences of two of them are numbers.
    float top[HEADS], weight[HEADS] = {}, sums[HEADS][PIECES][VECTOR] = {};
    #pragma unroll
    for (int h = 0; h < HEADS; h++) top[h] = -1e30f;
    for (u32 block = from; block < to; block += POSITIONS_A_STEP) {
        Pack<ELEMENT, VECTOR> key[AHEAD][PIECES], value[AHEAD][PIECES];
        #pragma unroll
        for (int a = 0; a < AHEAD; a++) {
            u32 at = block + a * TEAMS + team;
            const u64 offset = at < to ? pages.at(at) : 0;
            #pragma unroll
            for (int p = 0; p < PIECES; p++) {
                int element = (p * LANES + lane) * VECTOR;
                key[a][p] = {};
                value[a][p] = {};
                if (at < to && element < HEAD_DIM) {
                    key[a][p] = *(const Pack<ELEMENT, VECTOR>*)(keys + offset + element);
                    value[a][p] = *(const Pack<ELEMENT, VECTOR>*)(values + offset + element);
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
            float keep = exp2f(top[h] - high);
            top[h] = high;
            weight[h] *= keep;
            #pragma unroll
            for (int p = 0; p < PIECES; p++) {
                #pragma unroll
                for (int e = 0; e < VECTOR; e++) sums[h][p][e] *= keep;
            }
            #pragma unroll
            for (int a = 0; a < AHEAD; a++) {
                float of_key = exp2f(score[a] - high);
                weight[h] += of_key;
                #pragma unroll
                for (int p = 0; p < PIECES; p++) {
                    #pragma unroll
                    for (int e = 0; e < VECTOR; e++) sums[h][p][e] += of_key * widen(value[a][p].of[e]);
                }
            }
        }
    }

    // The teams of a warp become one.
    int warp = threadIdx.x / 32;
    #pragma unroll
    for (int h = 0; h < HEADS; h++) {
        float high = top[h];
        #pragma unroll
        for (int offset = LANES; offset < 32; offset *= 2) high = fmaxf(high, __shfl_xor_sync(0xffffffff, high, offset));
        float keep = exp2f(top[h] - high);
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
                if (threadIdx.x % 32 < LANES && at < HEAD_DIM) partials.sum[warp][h][at] = sum;
            }
        }
        if (threadIdx.x % 32 == 0) {
            partials.top[warp][h] = high;
            partials.weight[warp][h] = weight[h];
        }
    }
}

// The combination of splits: elements that a thread loads at once,
constexpr int PIECE = HEAD_DIM % 4 == 0 ? 4 : 2;
// such pieces of a block's heads for each thread,
constexpr int PIECES_A_THREAD = ceil_div(HEADS * HEAD_DIM / PIECE, DECODE_THREADS);
// and splits whose pieces it loads before it adds the first.
constexpr int IN_FLIGHT = greatest(16 / PIECES_A_THREAD, 1);
// Fewer positions than this are not worth a split of their own. The caller launches no more than MOST_SPLITS.
constexpr int FEWEST = greatest(64, POSITIONS_A_STEP);
constexpr int MOST_SPLITS = 64;

// Loads what another block has written.
template <int N> __device__ __forceinline__ Pack<float, N> load_fresh(const Pack<float, N>* from) {
    Pack<float, N> pack;
    if constexpr (N == 4) {
        const float4 four = __ldcg((const float4*)from);
        pack = {{four.x, four.y, four.z, four.w}};
    } else {
        const float2 two = __ldcg((const float2*)from);
        pack = {{two.x, two.y}};
    }
    return pack;
}

// Attends to the new position, whose key and value are not in the cache yet, and puts them there. A warp takes a head at a time.
__device__ __forceinline__ void attend_to_new(
    const Heads& mine, const ELEMENT* key, const ELEMENT* value, ELEMENT* new_key, ELEMENT* new_value, WarpPartials& partials
) {
    put(key, value, mine.rotation, new_key, new_value);
    for (int h = threadIdx.x / 32; h < HEADS; h += WARPS) {
        float score = 0.0f;
        for (int i = threadIdx.x % 32; i < HEAD_DIM; i += 32) {
            score += query_at(mine, h, i) * widen(narrow<ELEMENT>(rotated(key, mine.rotation, i)));
            partials.sum[WARPS][h][i] = widen(value[i]);
        }
        score = sum_of_warp(score);
        if (threadIdx.x % 32 == 0) {
            partials.top[WARPS][h] = score * mine.scale;
            partials.weight[WARPS][h] = 1.0f;
        }
    }
}

// Grid: x, splits of the positions; y, rows and blocks of their query heads. The device divides the positions
// into splits, as their number grows from launch to launch. The last split has the new position; the last one to finish combines all.
// `arrivals` is zero before and after.
extern "C" __global__ void __launch_bounds__(DECODE_THREADS) decode(
    const ELEMENT* qkv, const float2* rotations, const u32* __restrict__ batch, ELEMENT* keys,
    ELEMENT* values, ELEMENT* __restrict__ out, float* partial, u32* arrivals, u32, Shape shape
) {
    // Read before the wait: only copies write positions and page tables, and copies and kernels do not overlap.
    u32 across = shape.kv_heads * (GROUP / HEADS), row = blockIdx.y / across, heads = GROUP * shape.kv_heads;
    u32 position = batch[row], seen_to = position + 1, seen_from = first_seen(shape, seen_to);
    u32 length = ceil_div((seen_to - seen_from + gridDim.x - 1) / gridDim.x, FEWEST) * FEWEST;
    u32 splits = (seen_to - seen_from + length - 1) / length;
    // One split always exists, and its block waits, so this kernel ends after the previous one. The next kernel relies on that.
    if (blockIdx.x >= splits) return;
    u32 from = seen_from + blockIdx.x * length, to = min(from + length, position);
    u32 head = blockIdx.y % across * HEADS, kv_head = head / GROUP;
    const Pages pages = pages_of(shape, batch, row, kv_head);
    wait_for_previous();
    qkv += row * row_length(shape);
    out += (u64)row * heads * HEAD_DIM;
    const Heads mine = {qkv + (u64)head * HEAD_DIM, rotations + (u64)row * HALF, shape.scale * LOG2_E};
    __shared__ WarpPartials partials;
    const bool has_new = blockIdx.x == splits - 1;
    if (has_new) {
        const ELEMENT* key = qkv + (u64)(heads + kv_head) * HEAD_DIM;
        const u64 at = pages.at(position);
        attend_to_new(mine, key, key + (u64)shape.kv_heads * HEAD_DIM, keys + at, values + at, partials);
    }
    attend(mine, pages, keys, values, from, to, partials);
    __syncthreads();

    // Of each head and split the weighted sum; behind these the greatest score and the sum of weights.
    const u64 first = ((u64)row * heads + head) * gridDim.x;
    float* const left = partial + first * HEAD_DIM;
    float2* const left_weights = (float2*)(partial + (u64)shape.rows * heads * gridDim.x * HEAD_DIM) + first;
    const int parts = WARPS + has_new;
    for (int i = threadIdx.x; i < HEADS * HEAD_DIM; i += DECODE_THREADS) {
        int h = i / HEAD_DIM, at = i % HEAD_DIM;
        float high = partials.top[0][h];
        for (int p = 1; p < parts; p++) high = fmaxf(high, partials.top[p][h]);
        float sum = 0.0f, all = 0.0f;
        for (int p = 0; p < parts; p++) {
            float keep = exp2f(partials.top[p][h] - high);
            sum += keep * partials.sum[p][h][at];
            all += keep * partials.weight[p][h];
        }
        if (splits == 1) {
            out[(u64)(head + h) * HEAD_DIM + at] = narrow<ELEMENT>(sum / all);
            continue;
        }
        left[(h * gridDim.x + blockIdx.x) * HEAD_DIM + at] = sum;
        if (at == 0) left_weights[h * gridDim.x + blockIdx.x] = make_float2(high, all);
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
    Pack<float, PIECE> loaded[PIECES_A_THREAD][IN_FLIGHT];
    auto load = [&](u32 from) {
        #pragma unroll
        for (int p = 0; p < PIECES_A_THREAD; p++) {
            const int i = (threadIdx.x + p * DECODE_THREADS) * PIECE, h = i / HEAD_DIM;
            #pragma unroll
            for (int s = 0; s < IN_FLIGHT; s++) {
                if (h < HEADS && from + s < splits) {
                    loaded[p][s] = load_fresh((const Pack<float, PIECE>*)(left + (h * gridDim.x + from + s) * HEAD_DIM + i % HEAD_DIM));
                }
            }
        }
    };
    load(0);
    // The weight of each split, one warp a head.
    __shared__ float counts[HEADS][MOST_SPLITS], totals[HEADS];
    for (int h = threadIdx.x / 32; h < HEADS; h += WARPS) {
        float2 weights[MOST_SPLITS / 32];
        float high = -1e30f, all = 0.0f;
        #pragma unroll
        for (int i = 0; i < MOST_SPLITS / 32; i++) {
            const u32 s = threadIdx.x % 32 + 32 * i;
            weights[i] = s < splits ? __ldcg(left_weights + h * gridDim.x + s) : make_float2(-1e30f, 0.0f);
            high = fmaxf(high, weights[i].x);
        }
        for (int offset = 16; offset > 0; offset /= 2) high = fmaxf(high, __shfl_xor_sync(0xffffffff, high, offset));
        #pragma unroll
        for (int i = 0; i < MOST_SPLITS / 32; i++) {
            const float keep = exp2f(weights[i].x - high);
            counts[h][threadIdx.x % 32 + 32 * i] = keep;
            all += keep * weights[i].y;
        }
        all = sum_of_warp(all);
        if (threadIdx.x % 32 == 0) totals[h] = all;
    }
    __syncthreads();
    float sums[PIECES_A_THREAD][PIECE] = {};
    for (u32 from = 0; from < splits; from += IN_FLIGHT) {
        if (from > 0) load(from);
        #pragma unroll
        for (int p = 0; p < PIECES_A_THREAD; p++) {
            const int h = (threadIdx.x + p * DECODE_THREADS) * PIECE / HEAD_DIM;
            #pragma unroll
            for (int s = 0; s < IN_FLIGHT; s++) {
                if (h >= HEADS || from + s >= splits) continue;
                #pragma unroll
                for (int e = 0; e < PIECE; e++) sums[p][e] += counts[h][from + s] * loaded[p][s].of[e];
            }
        }
    }
    #pragma unroll
    for (int p = 0; p < PIECES_A_THREAD; p++) {
        const int i = (threadIdx.x + p * DECODE_THREADS) * PIECE, h = i / HEAD_DIM;
        if (h >= HEADS) continue;
        Pack<ELEMENT, PIECE> result;
        for (int e = 0; e < PIECE; e++) result.of[e] = narrow<ELEMENT>(sums[p][e] / totals[h]);
        *(Pack<ELEMENT, PIECE>*)(out + (u64)head * HEAD_DIM + i) = result;
    }
}

#endif

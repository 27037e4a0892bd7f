// Attention of one new position of each of some sequences. Compiled behind attention.cu, whose names it uses.

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
    wait_for_previous();
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

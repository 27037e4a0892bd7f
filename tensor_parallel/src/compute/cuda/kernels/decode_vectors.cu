// How a block of `decode` attends to positions in the cache, in f32. Compiled behind attention.cu, whose names it uses.

#ifndef DECODE_MMA

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

__device__ __forceinline__ void prefetch(const ELEMENT*, const ELEMENT*, u32, u32) {}

// Attends to the positions `from..to` of the cache, and leaves the partial results of each warp.
__device__ __forceinline__ void attend(
    const Heads& mine, const ELEMENT* keys, const ELEMENT* values, u32 from, u32 to, WarpPartials& partials
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
            #pragma unroll
            for (int p = 0; p < PIECES; p++) {
                int element = (p * LANES + lane) * VECTOR;
                key[a][p] = {};
                value[a][p] = {};
                if (at < to && element < HEAD_DIM) {
                    key[a][p] = *(const Pack<ELEMENT, VECTOR>*)(keys + (u64)at * HEAD_DIM + element);
                    value[a][p] = *(const Pack<ELEMENT, VECTOR>*)(values + (u64)at * HEAD_DIM + element);
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

#endif

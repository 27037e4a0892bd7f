// The softmax of attention, and what blocks leave that share the positions of a row. Compiled behind attention.cu and mma.cu, whose names
// it uses.

__device__ __forceinline__ float power_of_2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// Less than every score.
#define LOWEST (-1e30f)

// The greatest score of a query in some tiles, and the sum of the weights 2^((score - top) × scale).
struct Softmax {
    float top = LOWEST, weight = 0.0f;

    // Adds the next tile. Weighted sums of values become sum × keep + next sum × share.
    __device__ __forceinline__ void add(const Softmax& next, float scale, float& keep, float& share) {
        const float high = fmaxf(top, next.top);
        // Exactly 1 where the greatest stays: a tile in which a query sees nothing changes nothing.
        keep = power_of_2((top - high) * scale);
        share = power_of_2((next.top - high) * scale);
        top = high;
        weight = __fmaf_rn(next.weight, share, __fmul_rn(weight, keep));
    }
    static __device__ __forceinline__ float add_values(float sum, float keep, float next, float share) {
        return __fmaf_rn(next, share, __fmul_rn(sum, keep));
    }
};

// Split-KV, as in flash decoding: the blocks that share the positions of a row leave the weighted values and the softmax of each of their
// results, and the last block to finish adds them in ascending order.
struct Splits {
    // [results, GROUP, HEAD_DIM], and [results, GROUP].
    float* values;
    Softmax* softmax;

    __device__ __forceinline__ Splits(float* partial, const Shape& shape, u32 row, u32 kv_head) {
        const u64 all = (u64)shape.rows * shape.kv_heads * shape.results * GROUP;
        const u64 first = ((u64)row * shape.kv_heads + kv_head) * shape.results * GROUP;
        values = partial + first * HEAD_DIM;
        softmax = (Softmax*)(partial + all * HEAD_DIM) + first;
    }
    // Returns true in the last of `blocks` blocks that share a tile of queries. `arrivals` has a counter for each tile, zero before and after.
    static __device__ __forceinline__ bool are_complete(u32* arrivals, const Shape& shape, u32 blocks) {
        __shared__ bool last;
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) {
            u32* const counter = arrivals + blockIdx.y * (gridDim.x / shape.splits) + blockIdx.x / shape.splits;
            last = atomicAdd(counter, 1) == blocks - 1;
            if (last) *counter = 0;
        }
        __syncthreads();
        if (last) __threadfence();
        return last;
    }
    // Adds `count` results of the heads from `first` to `end`, and writes them behind `out`, the first head of the group.
    __device__ __forceinline__ void add(ELEMENT* out, u32 first, u32 end, u32 count, float scale) const {
        constexpr int PIECE = HEAD_DIM % 4 == 0 ? 4 : 2;
        constexpr u32 IN_FLIGHT = 12;
        #pragma unroll 1
        for (u32 i = first * HEAD_DIM + threadIdx.x * PIECE; i < end * HEAD_DIM; i += blockDim.x * PIECE) {
            Softmax all;
            float sums[PIECE] = {};
            #pragma unroll 1
            for (u32 from = 0; from < count; from += IN_FLIGHT) {
                Pack<float, PIECE> pieces[IN_FLIGHT];
                float2 softmaxes[IN_FLIGHT];
                #pragma unroll
                for (u32 r = 0; r < IN_FLIGHT; r++) {
                    if (from + r >= count) continue;
                    pieces[r] = load_fresh((const Pack<float, PIECE>*)(values + (u64)(from + r) * GROUP * HEAD_DIM + i));
                    softmaxes[r] = __ldcg((const float2*)(softmax + (u64)(from + r) * GROUP + i / HEAD_DIM));
                }
                #pragma unroll
                for (u32 r = 0; r < IN_FLIGHT; r++) {
                    if (from + r >= count) continue;
                    float keep, share;
                    all.add({softmaxes[r].x, softmaxes[r].y}, scale, keep, share);
                    #pragma unroll
                    for (int e = 0; e < PIECE; e++) sums[e] = Softmax::add_values(sums[e], keep, pieces[r].of[e], share);
                }
            }
            const float share = 1.0f / all.weight;
            Pack<ELEMENT, PIECE> result;
            #pragma unroll
            for (int e = 0; e < PIECE; e++) result.of[e] = narrow<ELEMENT>(sums[e] * share);
            *(Pack<ELEMENT, PIECE>*)(out + i) = result;
        }
    }

private:
    // Loads what another block has written.
    template <int N> static __device__ __forceinline__ Pack<float, N> load_fresh(const Pack<float, N>* from) {
        if constexpr (N == 4) {
            const float4 four = __ldcg((const float4*)from);
            return {{four.x, four.y, four.z, four.w}};
        } else {
            const float2 two = __ldcg((const float2*)from);
            return {{two.x, two.y}};
        }
    }
};

#if defined(MMA) || defined(WGMMA)

// A lane's parts of two queries, eight apart. Each tile of keys has a softmax of its own, and tiles are added in ascending order. Of four
// scores of a lane, the first two are those of the first query for the keys `column` and `column` + 1, the others those of the second.
struct Queries {
    u32 index[2], seen_to[2], seen_from[2];
    // Range seen by every query of the warp.
    u32 all_from, all_to;
    // Scores are multiplied by `scale`, then powers of 2.
    float scale;
    int column;
    Softmax all[2];

    // The 16 queries from `first` on, of `count`, from `position` on.
    __device__ __forceinline__ Queries(const Shape& shape, u32 first, u32 count, u32 position)
        : scale(shape.scale * LOG2_E), column(threadIdx.x % 4 * 2) {
        #pragma unroll
        for (int r = 0; r < 2; r++) {
            index[r] = first + threadIdx.x % 32 / 4 + 8 * r;
            seen_to[r] = position + min(index[r], count - 1) / GROUP + 1;
            seen_from[r] = first_seen(shape, seen_to[r]);
        }
        all_from = first_seen(shape, position + min(first + 15, count - 1) / GROUP + 1);
        all_to = position + min(first, count - 1) / GROUP + 1;
    }
    // Turns the scores of a tile, whose first key is at position `start`, into weights, and returns its softmax in `tile`.
    template <int COUNT> __device__ __forceinline__ void weigh(float (&score)[COUNT], u32 start, Softmax (&tile)[2]) const {
        if (start < all_from || start + COUNT * 2 > all_to) {
            #pragma unroll
            for (int i = 0; i < COUNT; i++) {
                u32 at = start + i / 4 * 8 + column + i % 2;
                if (at < seen_from[i / 2 % 2] || at >= seen_to[i / 2 % 2]) score[i] = UNSEEN;
            }
        }
        float high[2] = {LOWEST, LOWEST}, weight[2] = {}, least[2];
        #pragma unroll
        for (int i = 0; i < COUNT; i++) high[i / 2 % 2] = fmaxf(high[i / 2 % 2], score[i]);
        #pragma unroll
        for (int r = 0; r < 2; r++) {
            high[r] = fmaxf(high[r], __shfl_xor_sync(0xffffffff, high[r], 1));
            high[r] = fmaxf(high[r], __shfl_xor_sync(0xffffffff, high[r], 2));
            // Where nothing is seen, all weights are zero.
            least[r] = high[r] == LOWEST ? 0.0f : -high[r] * scale;
        }
        #pragma unroll
        for (int i = 0; i < COUNT; i++) {
            score[i] = power_of_2(__fmaf_rn(score[i], scale, least[i / 2 % 2]));
            weight[i / 2 % 2] += score[i];
        }
        #pragma unroll
        for (int r = 0; r < 2; r++) {
            weight[r] += __shfl_xor_sync(0xffffffff, weight[r], 1);
            weight[r] += __shfl_xor_sync(0xffffffff, weight[r], 2);
            tile[r].top = high[r];
            tile[r].weight = weight[r];
        }
    }
    // Adds the weighted values of a tile to the sums of those before.
    __device__ __forceinline__ void add(float (&sums)[HEAD_DIM / 2], const float (&values)[HEAD_DIM / 2], const Softmax (&tile)[2]) {
        float keep[2], share[2];
        #pragma unroll
        for (int r = 0; r < 2; r++) all[r].add(tile[r], scale, keep[r], share[r]);
        #pragma unroll
        for (int i = 0; i < HEAD_DIM / 2; i++) sums[i] = Softmax::add_values(sums[i], keep[i / 2 % 2], values[i], share[i / 2 % 2]);
    }
    // The weights of two tiles of 8 positions lie as the next product wants its first operand.
    template <int COUNT> static __device__ __forceinline__ void round(u32 (&rounded)[COUNT / 8][4], const float (&weights)[COUNT]) {
        #pragma unroll
        for (int k = 0; k < COUNT / 8; k++) {
            #pragma unroll
            for (int i = 0; i < 4; i++) rounded[k][i] = rounded_pair(weights[8 * k + 2 * i], weights[8 * k + 2 * i + 1]);
        }
    }
    // Leaves the weighted values and the softmax of a result.
    __device__ __forceinline__ void leave(
        const Splits& splits, u32 result, const float (&values)[HEAD_DIM / 2], const Softmax (&softmax)[2]
    ) const {
        #pragma unroll
        for (int r = 0; r < 2; r++) {
            if (index[r] >= GROUP) continue;
            const u64 head = (u64)result * GROUP + index[r];
            #pragma unroll
            for (int n = 0; n < HEAD_DIM / 8; n++)
                *(float2*)(splits.values + head * HEAD_DIM + n * 8 + column) = make_float2(values[4 * n + 2 * r], values[4 * n + 2 * r + 1]);
            if (threadIdx.x % 4 == 0) splits.softmax[head] = softmax[r];
        }
    }
    // Writes the sums of the queries, divided by their weights.
    __device__ __forceinline__ void store(const float (&sums)[HEAD_DIM / 2], ELEMENT* out, const Shape& shape, u32 kv_head, u32 count) const {
        #pragma unroll
        for (int r = 0; r < 2; r++) {
            if (index[r] >= count) continue;
            const float share = 1.0f / all[r].weight;
            const u32 row = index[r] / GROUP, head = kv_head * GROUP + index[r] % GROUP;
            ELEMENT* result = out + ((u64)row * GROUP * shape.kv_heads + head) * HEAD_DIM;
            #pragma unroll
            for (int n = 0; n < HEAD_DIM / 8; n++) {
                *(u32*)(result + n * 8 + column) = rounded_pair(sums[4 * n + 2 * r] * share, sums[4 * n + 2 * r + 1] * share);
            }
        }
    }
};

#endif

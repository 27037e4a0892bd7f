// A product of few rows of x with weights on the tensor cores (mma), for 16-bit types: out[m, n] = x[m, k] · w[n, k]ᵀ + bias[n]. Memory
// bounds it, so the weights are read once, and their copies never wait for other warps: each warp copies rows of the weights, and with them
// those of x, into a ring of STAGES stages in shared memory of its own, and multiplies them. Compiled behind mma.cu, whose names it uses.
//
// The sums are those of gemm.cu to the bit: a sum over k has LEAVES leaves, each of which a warp adds in ascending order of k; the leaves are
// added as a tree: neighbours in pairs while their number is even, then one after the other.
//
// ELEMENT is the type of the operands, RESULT that of the result. A tile has TILES times 8 rows of the weights, by TOKENS rows of x: 1, 8
// or 16. If GATED, the first half of the rows are gates, and out[m, n / 2] = silu(gate) × up: gates and their ups take turns in a tile.

constexpr int ROWS = 8 * TILES;
// Elements of a row in a stage, and parts of 16 bytes of those. Parts are swizzled by the row, so that eight rows lie in different banks.
constexpr int DEPTH = 128, PARTS = DEPTH / 8, ROW_BYTES = DEPTH * 2;
constexpr u32 STAGE_BYTES = (ROWS + TOKENS) * ROW_BYTES;
// Stages that are copied before the first is multiplied.
constexpr int AHEAD = STAGES - 1;
// Lanes with sums of a tile: each has those of two rows of the weights with a row of x, and with the row of x that is 8 further.
constexpr int LANES = TOKENS == 1 ? 4 : 32, SUMS = TOKENS == 16 ? 4 : 2;

struct Shape {
    // Rows of x and of the weights, length of a leaf, and that of a row of the weights: all leaves, or one, if those of the others follow.
    u32 m, n, k, row;
    // True if no kernel has written the weights, so that they may be read while the previous kernel runs.
    u32 is_settled;
};

__device__ __forceinline__ u32 place(u32 row, u32 part) { return row * ROW_BYTES + (part ^ (row & 7)) * 16; }
// Copies 16 bytes into shared memory, or zeros.
__device__ __forceinline__ void copy(u32 to, const ELEMENT* from, bool is_inside) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" :: "r"(to), "l"(from), "r"(is_inside ? 16 : 0) : "memory");
}
// As above, for what other warps copy as well.
__device__ __forceinline__ void copy_cached(u32 to, const ELEMENT* from, bool is_inside) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;" :: "r"(to), "l"(from), "r"(is_inside ? 16 : 0) : "memory");
}
// Eight rows by 32 elements, as mma takes them.
__device__ __forceinline__ void load(u32 (&parts)[4], u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
        : "=r"(parts[0]), "=r"(parts[1]), "=r"(parts[2]), "=r"(parts[3]) : "r"(from) : "memory");
}

// Grid: blocks of several groups of LEAVES warps. Each group takes every gridDim.x × groups-th tile.
extern "C" __global__ void __launch_bounds__(384) skinny(
    const ELEMENT* x, const ELEMENT* w, const float* bias, RESULT* __restrict__ out, Shape shape
) {
    extern __shared__ unsigned char memory[];
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32, leaf = warp % LEAVES;
    const u32 ring = (u32)__cvta_generic_to_shared(memory) + warp * STAGES * STAGE_BYTES;
    const u32 outputs = GATED ? shape.n / 2 : shape.n, steps = ceil_div(shape.k, DEPTH), stride = gridDim.x * (warps / LEAVES);
    const u32 tiles = ceil_div(shape.n, ROWS), first_tile = warp / LEAVES * gridDim.x + blockIdx.x;
    const u32 total = first_tile < tiles ? ceil_div(tiles - first_tile, stride) * steps : 0;
    x += leaf * shape.k;
    w += (u64)leaf * shape.k * (shape.row == shape.k ? shape.n : 1);

    // A lane copies a part of every second row.
    const u32 half = lane / PARTS, part = lane % PARTS;
    auto copy_weights = [&](u32 tile, u32 step, u32 slot) {
        const u32 to = ring + slot * STAGE_BYTES, at = step * DEPTH + part * 8;
        #pragma unroll
        for (u32 r = 0; r < ROWS; r += 2) {
            const u32 in_tile = r + half;
            const u32 row = GATED ? min(tile * (ROWS / 2) + in_tile / 2, outputs - 1) + in_tile % 2 * outputs : min(tile * ROWS + in_tile, outputs - 1);
            copy(to + place(in_tile, part), w + (u64)row * shape.row + at, at < shape.k);
        }
    };
    auto copy_x = [&](u32 step, u32 slot) {
        const u32 to = ring + slot * STAGE_BYTES + ROWS * ROW_BYTES, at = step * DEPTH + part * 8;
        #pragma unroll
        for (u32 r = 0; r < TOKENS; r += 2) {
            if (r + half < shape.m) copy_cached(to + place(r + half, part), x + (u64)(r + half) * shape.k * LEAVES + at, at < shape.k);
        }
    };
    auto commit = []() { asm volatile("cp.async.commit_group;" ::: "memory"); };
    // The next stage to copy.
    u32 next_tile = first_tile, next_step = 0;
    auto advance = [&]() {
        if (++next_step < steps) return;
        next_step = 0;
        next_tile += stride;
    };
    // The first weights do not wait for the previous kernel.
    if (!shape.is_settled) wait_for_previous();
    for (u32 s = 0; s < min(AHEAD, total); s++) {
        copy_weights(next_tile, next_step, s);
        advance();
    }
    if (shape.is_settled) wait_for_previous();
    for (u32 s = 0; s < AHEAD; s++) {
        if (s < total) copy_x(s % steps, s);
        commit();
    }

    float sums[4 * TILES];
    u32 tile = first_tile, step = 0, slot = 0, turn = 0;
    for (u32 i = 0; i < total; i++) {
        asm volatile("cp.async.wait_group %0;" :: "n"(AHEAD - 1) : "memory");
        __syncwarp();
        if (i + AHEAD < total) {
            const u32 last = slot == 0 ? AHEAD : slot - 1;
            copy_weights(next_tile, next_step, last);
            copy_x(next_step, last);
            advance();
        }
        commit();
        if (step == 0) {
            #pragma unroll
            for (int s = 0; s < 4 * TILES; s++) sums[s] = 0.0f;
        }
        const u32 stage = ring + slot * STAGE_BYTES;
        #pragma unroll
        for (int p = 0; p < PARTS; p += 4) {
            u32 rows[4], others[4] = {}, weights[4];
            const u32 at = p + lane / 8;
            load(rows, stage + place(ROWS + lane % least(TOKENS, 8), at));
            if (TOKENS == 16) load(others, stage + place(ROWS + 8 + lane % 8, at));
            const u32 low[4] = {rows[0], others[0], rows[1], others[1]}, high[4] = {rows[2], others[2], rows[3], others[3]};
            #pragma unroll
            for (int t = 0; t < TILES; t++) {
                load(weights, stage + place(t * 8 + lane % 8, at));
                multiply(sums, t, low, weights[0], weights[1]);
                multiply(sums, t, high, weights[2], weights[3]);
            }
        }
        if (++slot == STAGES) slot = 0;
        if (++step < steps) continue;
        step = 0;
        if constexpr (LEAVES > 1) {
            // Two turns have room, so that a warp that adds does not delay the others.
            auto of_leaf = [&](u32 leaf) {
                return (float*)(memory + warps * STAGES * STAGE_BYTES) + ((turn * warps + warp - warp % LEAVES + leaf) * LANES + lane) * TILES * SUMS;
            };
            if (lane < LANES) {
                #pragma unroll
                for (int s = 0; s < TILES * SUMS; s++) of_leaf(leaf)[s] = sums[s / SUMS * 4 + s % SUMS];
            }
            asm volatile("bar.sync %0, %1;" :: "r"(1 + warp / LEAVES), "n"(LEAVES * 32) : "memory");
            if (leaf == 0 && lane < LANES) {
                #pragma unroll
                for (int s = 0; s < TILES * SUMS; s++) {
                    float parts[LEAVES];
                    #pragma unroll
                    for (int l = 0; l < LEAVES; l++) parts[l] = of_leaf(l)[s];
                    constexpr int PAIRS = LEAVES & -LEAVES;
                    #pragma unroll
                    for (int step = 1; step < LEAVES; step += step < PAIRS ? step : PAIRS) {
                        #pragma unroll
                        for (int l = 0; l < LEAVES; l += step < PAIRS ? 2 * step : LEAVES) parts[l] += parts[l + step];
                    }
                    sums[s / SUMS * 4 + s % SUMS] = parts[0];
                }
            }
            turn ^= 1;
        }
        if (leaf == 0) {
            #pragma unroll
            for (int s = 0; s < TILES * SUMS; s += 2) {
                const u32 token = lane / 4 + s % SUMS * 4, in_tile = s / SUMS * 8 + lane % 4 * 2;
                const float* const two = sums + s / SUMS * 4 + s % SUMS;
                if (token >= shape.m) continue;
                RESULT* const of_token = out + (u64)token * outputs;
                auto rounded = [&](float sum, u32 row) { return narrow<RESULT>(sum + (bias ? bias[row] : 0.0f)); };
                if constexpr (GATED) {
                    // Rounded as in kernels of their own.
                    const u32 to = tile * (ROWS / 2) + in_tile / 2;
                    if (to < outputs) of_token[to] = narrow<RESULT>(gated(widen(rounded(two[0], to)), widen(rounded(two[1], outputs + to))));
                } else {
                    const u32 to = tile * ROWS + in_tile;
                    if (to < outputs) of_token[to] = rounded(two[0], to);
                    if (to + 1 < outputs) of_token[to + 1] = rounded(two[1], to + 1);
                }
            }
        }
        tile += stride;
    }
}

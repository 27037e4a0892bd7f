// A product of few rows of x with weights on the tensor cores (mma), for 16-bit types: out[m, n] = x[m, k] · w[n, k]ᵀ + bias[n]. Memory
// bounds it, so a block reads weights once for its TOKENS rows of x, and warps wait for each other only to add leaves: each copies rows of the weights, and with them
// those of x, into a ring of STAGES stages in shared memory of its own, and multiplies them. Compiled behind mma.cu, whose names it uses.
//
// The sums are those of gemm.cu to the bit: a sum over k has LEAVES leaves, each of which a warp adds in ascending order of k; the leaves
// are added as a tree: neighbours in pairs while their number is even, then one after the other. A block has GROUPS groups of LEAVES warps.
//
// ELEMENT is the type of the operands, RESULT that of the result. A tile is 8 × TILES rows of the weights by TOKENS rows of x, 1 or 8. If
// GATED, the first half of the rows are gates, and out[m, n / 2] = silu(gate) × up: gates and ups alternate in a tile.

constexpr int ROWS = 8 * TILES, WARPS = GROUPS * LEAVES;
// Elements of a row in a stage, and parts of 16 bytes of those. Parts are swizzled by the row, so that eight rows lie in different banks.
constexpr int DEPTH = 128, PARTS = DEPTH / 8, ROW_BYTES = DEPTH * 2;
constexpr u32 STAGE_BYTES = (ROWS + TOKENS) * ROW_BYTES;
// Stages that are in flight while a warp reads one.
constexpr u32 AHEAD = STAGES - 1;

struct Shape {
    // Rows of x and of the weights, the length of a leaf, and the distance of two rows of the weights: all leaves, or one if they lie leaf
    // by leaf.
    u32 m, n, k, row;
    // True if no kernel has written the weights, so that they may be read while earlier kernels run.
    u32 is_settled;
};

__device__ __forceinline__ u32 place(u32 row, u32 part) { return row * ROW_BYTES + (part ^ (row & 7)) * 16; }
// Copies 16 bytes into shared memory, or zeros, wherever `from` is.
__device__ __forceinline__ void copy(u32 to, const ELEMENT* from, bool is_inside) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" :: "r"(to), "l"(from), "r"(is_inside ? 16 : 0) : "memory");
}
// As above, through the L1 cache, for what other warps copy as well.
__device__ __forceinline__ void copy_cached(u32 to, const ELEMENT* from, bool is_inside) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;" :: "r"(to), "l"(from), "r"(is_inside ? 16 : 0) : "memory");
}
// Eight rows by 32 elements, as mma takes them.
__device__ __forceinline__ void load(u32 (&parts)[4], u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
        : "=r"(parts[0]), "=r"(parts[1]), "=r"(parts[2]), "=r"(parts[3]) : "r"(from) : "memory");
}

// Grid: x, blocks, each group of which takes every gridDim.x × GROUPS-th tile; y, blocks of TOKENS rows of x.
extern "C" __global__ void __launch_bounds__(WARPS * 32) skinny(
    const ELEMENT* x, const ELEMENT* w, const float* bias, RESULT* __restrict__ out, Shape shape
) {
    extern __shared__ __align__(256) unsigned char memory[];
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = warp / LEAVES, leaf = warp % LEAVES;
    const u32 ring = (u32)__cvta_generic_to_shared(memory) + warp * STAGES * STAGE_BYTES;
    const u32 outputs = GATED ? shape.n / 2 : shape.n, tiles = ceil_div(shape.n, ROWS), steps = ceil_div(shape.k, DEPTH);
    const u32 first_tile = group * gridDim.x + blockIdx.x, stride = gridDim.x * GROUPS;
    const u32 total = first_tile < tiles ? ceil_div(tiles - first_tile, stride) * steps : 0;
    // The warps of a group store their sums here.
    float2* const of_group = (float2*)(memory + WARPS * STAGES * STAGE_BYTES) + group * LEAVES * TOKENS * 4 * TILES;
    const u32 first_row = blockIdx.y * TOKENS, rows_of_x = min(shape.m - first_row, TOKENS);
    x += ((u64)first_row * LEAVES + leaf) * shape.k;
    out += (u64)first_row * outputs;
    w += (u64)leaf * shape.k * (shape.row == shape.k ? shape.n : 1);

    // A lane copies one part of every second row: if GATED, of the gates or of the ups.
    const u32 half = lane / PARTS, part = lane % PARTS, first = ring + place(half, part);
    constexpr u32 APART = GATED ? 1 : 2;
    u32 next_tile = first_tile, next_step = 0;
    auto copy_weights = [&](u32 slot) {
        const u32 to = first + slot * STAGE_BYTES, at = next_step * DEPTH + part * 8;
        const u32 row = next_tile * (ROWS / 2) * APART + (GATED ? 0 : half), rows = at < shape.k && row < outputs ? outputs - row : 0;
        const ELEMENT* from = w + (u64)(row + (GATED ? half * outputs : 0)) * shape.row + at;
        #pragma unroll
        for (int r = 0; r < ROWS / 2; r++)
            copy((to ^ (2 * r & 7) * 16) + 2 * r * ROW_BYTES, from + (u64)r * APART * shape.row, r * APART < rows);
    };
    auto copy_x = [&](u32 step, u32 slot) {
        const u32 to = first + slot * STAGE_BYTES, at = step * DEPTH + part * 8;
        const bool is_inside = at < shape.k;
        #pragma unroll
        for (int r = 0; r < TOKENS; r += 2) {
            if (r + half < rows_of_x)
                copy_cached((to ^ r * 16) + (ROWS + r) * ROW_BYTES, x + (u64)(r + half) * shape.k * LEAVES + at, is_inside);
        }
    };
    auto commit = []() { asm volatile("cp.async.commit_group;" ::: "memory"); };
    auto advance = [&]() {
        if (++next_step < steps) return;
        next_step = 0;
        next_tile += stride;
    };
    // The first weights do not wait for the previous kernel.
    if (!shape.is_settled) wait_for_previous();
    for (u32 s = 0; s < min(AHEAD, total); s++) {
        copy_weights(s);
        advance();
    }
    if (shape.is_settled) wait_for_previous();
    #pragma unroll 1
    for (u32 s = 0, step = 0; s < AHEAD; s++) {
        if (s < total) copy_x(step, s);
        commit();
        if (++step == steps) step = 0;
    }

    float sums[4 * TILES];
    u32 tile = first_tile, step = 0, slot = 0, turn = 0;
    for (u32 i = 0; i < total; i++) {
        asm volatile("cp.async.wait_group %0;" :: "n"(AHEAD - 1) : "memory");
        // All lanes have read the stage before another takes its place.
        __syncwarp();
        if (i + AHEAD < total) {
            const u32 read = slot == 0 ? AHEAD : slot - 1;
            copy_weights(read);
            copy_x(next_step, read);
            advance();
        }
        commit();
        if (step == 0) {
            #pragma unroll
            for (int s = 0; s < 4 * TILES; s++) sums[s] = 0.0f;
        }
        const u32 weights_at = ring + slot * STAGE_BYTES + place(lane % 8, lane / 8);
        const u32 x_at = ring + slot * STAGE_BYTES + place(lane % TOKENS, lane / 8) + ROWS * ROW_BYTES;
        #pragma unroll
        for (int p = 0; p < PARTS; p += 4) {
            u32 rows[4], weights[4];
            load(rows, x_at ^ p * 16);
            const u32 low[4] = {rows[0], 0, rows[1], 0}, high[4] = {rows[2], 0, rows[3], 0};
            #pragma unroll
            for (int t = 0; t < TILES; t++) {
                load(weights, (weights_at ^ p * 16) + t * 8 * ROW_BYTES);
                multiply(sums, t, low, weights[0], weights[1]);
                multiply(sums, t, high, weights[2], weights[3]);
            }
        }
        if (++slot == STAGES) slot = 0;
        if (++step < steps) continue;
        step = 0;
        // A lane has the sums of a row of x with two rows of each eight of the weights.
        const u32 token = lane / 4;
        if constexpr (LEAVES > 1) {
            // Two turns have room, so that a warp that adds does not delay the others.
            auto of_leaf = [&](u32 l) { return of_group + ((turn * WARPS + l) * TOKENS * 4 + lane) * TILES; };
            if (token < TOKENS) {
                #pragma unroll
                for (int t = 0; t < TILES; t++) of_leaf(leaf)[t] = make_float2(sums[4 * t], sums[4 * t + 1]);
            }
            asm volatile("bar.sync %0, %1;" :: "r"(1 + group), "n"(LEAVES * 32) : "memory");
            if (leaf == 0 && token < TOKENS) {
                #pragma unroll
                for (int t = 0; t < TILES; t++) {
                    float2 parts[LEAVES];
                    #pragma unroll
                    for (int l = 0; l < LEAVES; l++) parts[l] = of_leaf(l)[t];
                    const float2 sum = sum_of_tree(parts, [](float2 a, float2 b) { return make_float2(a.x + b.x, a.y + b.y); });
                    sums[4 * t] = sum.x;
                    sums[4 * t + 1] = sum.y;
                }
            }
            turn ^= 1;
        }
        if (leaf == 0 && token < rows_of_x) {
            RESULT* const of_token = out + (u64)token * outputs;
            auto rounded = [&](float sum, u32 row) { return narrow<RESULT>(sum + (bias ? bias[row] : 0.0f)); };
            #pragma unroll
            for (int t = 0; t < TILES; t++) {
                const u32 in_tile = t * 8 + lane % 4 * 2, to = GATED ? (tile * ROWS + in_tile) / 2 : tile * ROWS + in_tile;
                if constexpr (GATED) {
                    // Rounded as separate kernels would.
                    if (to >= outputs) continue;
                    const RESULT gate = rounded(sums[4 * t], to), up = rounded(sums[4 * t + 1], outputs + to);
                    of_token[to] = narrow<RESULT>(gated(widen(gate), widen(up)));
                } else {
                    if (to < outputs) of_token[to] = rounded(sums[4 * t], to);
                    if (to + 1 < outputs) of_token[to + 1] = rounded(sums[4 * t + 1], to + 1);
                }
            }
        }
        tile += stride;
    }
}

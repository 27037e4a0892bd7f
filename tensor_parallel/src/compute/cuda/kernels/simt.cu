// A product of any types without tensor cores, for invariant numerics: out[m, n] = x[m, k] · w[n, k]ᵀ + bias[n]. The leaves of a sum are
// added as in skinny.cu.
//
// ELEMENT is the type of x, OTHER that of the weights, RESULT that of the result.

struct Shape {
    // As in skinny.cu.
    u32 m, n, k, row;
};

// Grid: x, blocks of warps, each of which has COLUMNS outputs of a row of x; y, blocks that stride over the rows.
extern "C" __global__ void __launch_bounds__(128) simt(
    const ELEMENT* x, const OTHER* w, const float* bias, RESULT* __restrict__ out, Shape shape
) {
    const u32 lane = threadIdx.x % 32, first = (blockIdx.x * blockDim.x + threadIdx.x) / 32 * COLUMNS;
    const u64 from_leaf_to_leaf = shape.row == shape.k ? (u64)shape.n * shape.k : shape.k;
    const OTHER* of_column[COLUMNS];
    #pragma unroll
    for (int c = 0; c < COLUMNS; c++) of_column[c] = w + (u64)min(first + c, shape.n - 1) * shape.row;
    wait_for_previous();
    for (u64 row = blockIdx.y; row < shape.m; row += gridDim.y) {
        float sums[COLUMNS][LEAVES] = {};
        #pragma unroll
        for (int l = 0; l < LEAVES; l++) {
            for (u32 i = lane; i < shape.k; i += 32) {
                const float by = widen(x[(row * LEAVES + l) * shape.k + i]);
                #pragma unroll
                for (int c = 0; c < COLUMNS; c++) sums[c][l] += widen(of_column[c][l * from_leaf_to_leaf + i]) * by;
            }
        }
        #pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
            #pragma unroll
            for (int l = 0; l < LEAVES; l++) sums[c][l] = sum_of_warp(sums[c][l]);
            const float sum = sum_of_tree(sums[c], [](float a, float b) { return a + b; });
            const u32 column = first + c;
            if (lane == 0 && column < shape.n) out[row * shape.n + column] = narrow<RESULT>(sum + (bias ? bias[column] : 0.0f));
        }
    }
}

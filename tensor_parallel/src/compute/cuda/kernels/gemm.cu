// A product with weights on the tensor cores of Hopper: out[m, n] = x[m, k] · w[n, k]ᵀ + bias[n], for 16-bit types. One warp, the
// producer, copies tiles of both operands into a ring of STAGES stages in shared memory (TMA); warp groups multiply them (wgmma): 64 rows
// of the weights by TOKENS rows of x. Compiled behind wgmma.cu, whose names it uses.
//
// A sum over k has BLOCKS × LEAVES leaves: LEAVES, a power of two, in each of the BLOCKS blocks that share a tile of the result
// (split-K). A leaf is added in ascending order of k, and the leaves as a tree: neighbours in pairs while their number is even,
// then one after the other. The sizes of tiles change none of this, so a row of the result depends on that row of x alone.
//
// ELEMENT is the type of the operands, RESULT that of the result. A tile has TILES times 64 rows of the weights for each of GROUPS warp
// groups. If GATED, the first half of the rows are gates, and out[m, n / 2] = silu(gate) × up: of every two boxes of rows the first has
// gates and the second their ups.

constexpr int DEPTH = 64;
constexpr u32 W_BYTES = 64 * DEPTH * 2, X_BYTES = TOKENS * DEPTH * 2;
constexpr u32 STAGE_BYTES = GROUPS * TILES * W_BYTES + X_BYTES;
// A block with two warp groups of consumers has a multiprocessor to itself, and takes one part after the other, or one part if it shares
// its tile. Its producer is in a third warp group, which gives its registers to the consumers.
constexpr bool PERSISTENT = GROUPS > 1;
constexpr int CONSUMERS = GROUPS * 128, THREADS = CONSUMERS + (PERSISTENT ? 128 : 32);
// Levels of the tree of a block, at least one for the compiler. Sums of the lower levels wait for their neighbours in registers, the
// others in shared memory.
constexpr int TREE = LEAVES == 8 ? 3 : LEAVES == 4 ? 2 : 1, IN_REGISTERS = least(TREE, TOKENS * TILES <= 64 ? 3 : 2);
static_assert(LEAVES == 1 || TOKENS * TILES <= 128, "two levels have room in registers");
// Vectors of four sums of a thread, and the bytes of those of a block.
constexpr u32 VECTORS = TILES * TOKENS / 8, WAITING_BYTES = TREE > IN_REGISTERS ? VECTORS * CONSUMERS * 16 : 0;
// Rows of the weights and outputs of a tile.
constexpr int ROWS = GROUPS * TILES * 64, OUTPUTS = GATED ? ROWS / 2 : ROWS;
// Rows of the weights that are copied at a time.
constexpr int BOX = least(OUTPUTS, 64);
constexpr u32 BOX_BYTES = BOX * DEPTH * 2;
// Sums on their way from registers to the result, [AT_ONCE, ROWS]: rows are longer by 16 bytes, so that they lie in different banks.
// A block of one warp group puts them in the place of the stages.
constexpr int AT_ONCE = PERSISTENT ? 16 : TOKENS, PITCH = ROWS + 4;
// Vectors of the result that a thread adds before it writes any, so that their reads overlap.
constexpr int OF_THREAD = (TOKENS * OUTPUTS + CONSUMERS * 4 - 1) / (CONSUMERS * 4);
constexpr int TOGETHER = least(OF_THREAD, BLOCKS * (GATED ? 2 : 1) > 4 ? 2 : 4);
static_assert(OF_THREAD == 1 || TOKENS * OUTPUTS % (TOGETHER * CONSUMERS * 4) == 0, "threads have like numbers of vectors");
// Tiles of tokens whose blocks follow each other: their operands stay in the L2 cache.
constexpr u32 BAND = 16;

// The driver's description of a tensor of [leaves, rows, k].
struct alignas(128) TensorMap { u64 words[16]; };

struct Shape {
    // Rows of x and of the weights, and length of a leaf.
    u32 m, n, k;
    // True if no kernel has written the weights, so that they may be read while earlier kernels run.
    u32 is_settled;
};

__device__ __forceinline__ void expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(barrier) : "memory");
}
__device__ __forceinline__ void wait(u32 barrier, u32 parity) {
    asm volatile("{.reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @!p bra again;}"
        :: "r"(barrier), "r"(parity) : "memory");
}
// Copies a box into shared memory: from element `at` of row `row` of a leaf on. What the tensor does not have is zero.
__device__ __forceinline__ void copy(u32 to, const TensorMap& map, u32 at, u32 row, u32 leaf, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];"
        :: "r"(to), "l"(&map), "r"(at), "r"(row), "r"(leaf), "r"(barrier) : "memory");
}

__device__ __forceinline__ float4 load_shared(u32 address) {
    float4 four;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(four.x), "=f"(four.y), "=f"(four.z), "=f"(four.w) : "r"(address) : "memory");
    return four;
}
__device__ __forceinline__ void wait_for_consumers() { asm volatile("bar.sync 1, %0;" :: "n"(CONSUMERS) : "memory"); }

// The sum of four elements of all blocks, which `load` returns.
template <typename Load> __device__ __forceinline__ float4 add_blocks(Load load) {
    float4 parts[BLOCKS];
    #pragma unroll
    for (int b = 0; b < BLOCKS; b++) parts[b] = load(b);
    return sum_of_tree(parts, [](float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); });
}

// Grid: blocks, each of which takes every gridDim.x-th part of the tiles. The last part of a tile to finish adds
// all: `partial` has [BLOCKS, TOKENS, ROWS] sums for each tile, and `arrivals` a counter, which is zero before and after.
extern "C" __global__ void __launch_bounds__(THREADS) gemm(
    const __grid_constant__ TensorMap w_map, const __grid_constant__ TensorMap x_map, const float* bias,
    RESULT* __restrict__ out, float* partial, u32* arrivals, Shape shape
) {
    extern __shared__ unsigned char memory[];
    __shared__ alignas(8) u64 barriers[2 * STAGES];
    const u32 stages = ((u32)__cvta_generic_to_shared(memory) + 1023) / 1024 * 1024;
    const u32 full = (u32)__cvta_generic_to_shared(barriers), empty = full + STAGES * 8;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(full + s * 8) : "memory");
            asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(empty + s * 8), "r"(GROUPS * 4) : "memory");
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();

    const u32 outputs = GATED ? shape.n / 2 : shape.n, across = ceil_div(outputs, OUTPUTS), down = ceil_div(shape.m, TOKENS);
    const u32 steps_of_leaf = ceil_div(shape.k, DEPTH), parts = across * down * BLOCKS;
    // The first row of the weights and of x of a part, and its first leaf.
    struct Corner { u32 row, token, leaf; };
    auto corner = [&](u32 part) -> Corner {
        const u32 tile = part / BLOCKS;
        const u32 band = tile / (BAND * across), in_band = tile % (BAND * across), height = min(BAND, down - band * BAND);
        return {in_band / height * OUTPUTS, (band * BAND + in_band % height) * TOKENS, part % BLOCKS * LEAVES};
    };
    if (threadIdx.x >= CONSUMERS) {
        if (PERSISTENT) asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x > CONSUMERS) return;
        u32 stage = 0, turn = 0;
        auto copy_weights = [&](Corner at, u32 leaf, u32 k, u32 stage) {
            const u32 barrier = full + stage * 8, to = stages + stage * STAGE_BYTES;
            expect(barrier, STAGE_BYTES);
            #pragma unroll
            for (int b = 0; b < ROWS / BOX; b++) {
                const u32 from = GATED ? at.row + b / 2 * BOX + b % 2 * outputs : at.row + b * BOX;
                copy(to + b * BOX_BYTES, w_map, k, from, leaf, barrier);
            }
        };
        auto copy_x = [&](Corner at, u32 leaf, u32 k, u32 stage) {
            copy(stages + stage * STAGE_BYTES + GROUPS * TILES * W_BYTES, x_map, k, at.token, leaf, full + stage * 8);
        };
        // The first weights do not wait for the previous kernel.
        const u32 ahead = shape.is_settled ? min(STAGES, steps_of_leaf) : 0;
        for (u32 part = blockIdx.x; part < parts; part += gridDim.x) {
            const Corner at = corner(part);
            for (u32 l = 0; l < LEAVES; l++) {
                const u32 leaf = at.leaf + l;
                const bool is_first = part == blockIdx.x && l == 0;
                if (is_first) {
                    for (u32 i = 0; i < ahead; i++) copy_weights(at, leaf, i * DEPTH, i);
                    wait_for_previous();
                }
                for (u32 i = 0; i < steps_of_leaf; i++) {
                    if (turn > 0) wait(empty + stage * 8, (turn - 1) % 2);
                    if (!is_first || i >= ahead) copy_weights(at, leaf, i * DEPTH, stage);
                    copy_x(at, leaf, i * DEPTH, stage);
                    if (++stage == STAGES) {
                        stage = 0;
                        turn++;
                    }
                }
            }
        }
        return;
    }

    if (PERSISTENT) asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    const u32 group = threadIdx.x / 128, lane = threadIdx.x % 32, waits = stages + STAGES * STAGE_BYTES;
    const u32 staging = PERSISTENT ? waits + WAITING_BYTES : stages;
    wait_for_previous();
    u32 stage = 0, turn = 0;
    for (u32 part = blockIdx.x; part < parts; part += gridDim.x) {
        // Sums of 1, 2, 4 … leaves that wait for their neighbours.
        Tile sums[TILES], waiting[IN_REGISTERS][TILES];
        for (u32 leaf = 0; leaf < LEAVES; leaf++) {
            if constexpr (WAITING_BYTES > 0) {
                // Without these zeros the compiler waits for each product.
                #pragma unroll
                for (int t = 0; t < TILES; t++) {
                    #pragma unroll
                    for (int i = 0; i < TOKENS / 2; i++) sums[t][i] = 0.0f;
                }
            }
            u32 before = 0;
            for (u32 i = 0; i < steps_of_leaf; i++) {
                const u32 x = stages + stage * STAGE_BYTES + GROUPS * TILES * W_BYTES, w = stages + stage * STAGE_BYTES + group * TILES * W_BYTES;
                wait(full + stage * 8, turn % 2);
                begin_products();
                #pragma unroll
                for (int k = 0; k < DEPTH / 16; k++) {
                    #pragma unroll
                    for (int t = 0; t < TILES; t++) {
                        multiply_rows(sums[t], operand(w + t * W_BYTES + k * 32, 0), operand(x + k * 32, 0), i + k);
                    }
                }
                end_products();
                asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
                if (i > 0 && lane == 0) arrive(before);
                before = empty + stage * 8;
                if (++stage == STAGES) {
                    stage = 0;
                    turn++;
                }
            }
            #pragma unroll
            for (int t = 0; t < TILES; t++) wait_for_all(sums[t]);
            if (lane == 0) arrive(before);
            bool has_neighbour = true;
            #pragma unroll
            for (int level = 0; 1 << level < LEAVES; level++) {
                if (!has_neighbour) continue;
                has_neighbour = leaf >> level & 1;
                if (level >= IN_REGISTERS) {
                    #pragma unroll
                    for (int v = 0; v < VECTORS; v++) {
                        float* const four = &sums[v / (TOKENS / 8)][v % (TOKENS / 8) * 4];
                        const u32 there = waits + (v * CONSUMERS + threadIdx.x) * 16;
                        if (has_neighbour) {
                            const float4 other = load_shared(there);
                            four[0] += other.x; four[1] += other.y; four[2] += other.z; four[3] += other.w;
                        } else {
                            asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};"
                                :: "r"(there), "f"(four[0]), "f"(four[1]), "f"(four[2]), "f"(four[3]) : "memory");
                        }
                    }
                    continue;
                }
                #pragma unroll
                for (int t = 0; t < TILES; t++) {
                    #pragma unroll
                    for (int i = 0; i < TOKENS / 2; i++) {
                        if (has_neighbour) sums[t][i] += waiting[level][t][i];
                        else waiting[level][t][i] = sums[t][i];
                    }
                }
            }
        }

        const Corner at = corner(part);
        // Four sums of the result, and those of their ups.
        struct Four { float4 sums[GATED ? 2 : 1]; };
        auto add = [&](u32 in_result, auto load) -> Four {
            if constexpr (GATED) {
                const u32 gate = in_result / BOX * (2 * BOX) + in_result % BOX;
                return {add_blocks([&](int b) { return load(b, gate); }), add_blocks([&](int b) { return load(b, gate + BOX); })};
            } else {
                return {add_blocks([&](int b) { return load(b, in_result); })};
            }
        };
        auto write = [&](u32 of, u32 in_result, const Four& four) {
            const u32 token = at.token + of, to = at.row + in_result;
            if (token >= shape.m || to >= outputs) return;
            auto rounded = [&](float4 sum, u32 first) {
                const float sums[] = {sum.x, sum.y, sum.z, sum.w};
                Pack<RESULT, 4> result;
                #pragma unroll
                for (int e = 0; e < 4; e++) result.of[e] = narrow<RESULT>(sums[e] + (bias && to + e < outputs ? bias[first + e] : 0.0f));
                return result;
            };
            // Gates and ups are rounded as in kernels of their own.
            Pack<RESULT, 4> result = rounded(four.sums[0], to);
            if constexpr (GATED) {
                const Pack<RESULT, 4> ups = rounded(four.sums[1], outputs + to);
                #pragma unroll
                for (int e = 0; e < 4; e++) result.of[e] = narrow<RESULT>(gated(widen(result.of[e]), widen(ups.of[e])));
            }
            RESULT* const there = out + (u64)token * outputs + to;
            if (outputs % 4 == 0) {
                *(Pack<RESULT, 4>*)there = result;
            } else {
                for (u32 e = 0; e < min(4, outputs - to); e++) there[e] = result.of[e];
            }
        };
        // A lane has the rows `mine` and `mine` + 8 of each tile, two tokens of every eight.
        const u32 mine = group * TILES * 64 + threadIdx.x / 32 % 4 * 16 + lane / 4;
        // All have read the operands before sums take their place.
        if (!PERSISTENT) wait_for_consumers();
        auto staged = [&](u32 of, u32 in_tile) { return load_shared(staging + (of * PITCH + in_tile) * 4); };
        auto of_block = [&](u32 b, u32 of, u32 in_tile) { return (float4*)(partial + ((u64)(part / BLOCKS * BLOCKS + b) * TOKENS + of) * ROWS + in_tile); };
        #pragma unroll
        for (int first = 0; first < TOKENS; first += AT_ONCE) {
            #pragma unroll
            for (int t = 0; t < TILES; t++) {
                #pragma unroll
                for (int i = 0; i < AT_ONCE / 2; i++) {
                    const u32 of = i / 4 * 8 + lane % 4 * 2 + i % 2, in_tile = mine + t * 64 + i / 2 % 2 * 8;
                    asm volatile("st.shared.f32 [%0], %1;" :: "r"(staging + (of * PITCH + in_tile) * 4), "f"(sums[t][first / 2 + i]) : "memory");
                }
            }
            wait_for_consumers();
            constexpr u32 COLUMNS = BLOCKS == 1 ? OUTPUTS : ROWS;
            for (u32 i = threadIdx.x * 4; i < AT_ONCE * COLUMNS; i += CONSUMERS * 4) {
                const u32 of = i / COLUMNS, in_tile = i % COLUMNS;
                if constexpr (BLOCKS == 1) {
                    write(first + of, in_tile, add(in_tile, [&](int, u32 in_tile) { return staged(of, in_tile); }));
                } else {
                    if (at.token + first + of < shape.m) *of_block(part % BLOCKS, first + of, in_tile) = staged(of, in_tile);
                }
            }
            // All have read the staged sums before others take their place.
            if (PERSISTENT) wait_for_consumers();
        }
        if constexpr (BLOCKS > 1) {
            __shared__ bool last;
            __threadfence();
            wait_for_consumers();
            if (threadIdx.x == 0) {
                last = atomicAdd(arrivals + part / BLOCKS, 1) == BLOCKS - 1;
                if (last) arrivals[part / BLOCKS] = 0;
            }
            wait_for_consumers();
            if (!last) return;
            __threadfence();
            const u32 elements = min(TOKENS, shape.m - at.token) * OUTPUTS;
            for (u32 from = threadIdx.x * 4; from < elements; from += TOGETHER * CONSUMERS * 4) {
                Four fours[TOGETHER];
                #pragma unroll
                for (int f = 0; f < TOGETHER; f++) {
                    const u32 i = from + f * CONSUMERS * 4, of = i / OUTPUTS;
                    fours[f] = add(i % OUTPUTS, [&](int b, u32 in_tile) { return __ldcg(of_block(b, of, in_tile)); });
                }
                #pragma unroll
                for (int f = 0; f < TOGETHER; f++) {
                    const u32 i = from + f * CONSUMERS * 4;
                    write(i / OUTPUTS, i % OUTPUTS, fours[f]);
                }
            }
        }
    }
}

// Common code of attention kernels, and the kernel that appends to the KV cache. HEAD_DIM is the length of a head, GROUP how
// many query heads share a key/value head.
//
// A row of `qkv` is the query heads, the key heads, then the value heads. The cache is
// [pages, kv_heads, PAGE_SIZE, HEAD_DIM]. Queries are rotated when they are read; keys are rotated and rounded when they
// enter the cache. `batch` is the position of each row, then the page table of each run: a recorded launch can be
// repeated for every later position, and for other sequences.

constexpr int HALF = HEAD_DIM / 2;
#define LOG2_E 1.4426950408889634f
// The score of a position that a query does not see: its weight is zero.
#define UNSEEN (__int_as_float(0xff800000))

struct Shape {
    // Rows of the batch's part; how many of them follow each other in one sequence; pages of a table.
    u32 rows, run, kv_heads, pages;
    // Number of positions that a query sees, its own included; all when zero.
    u32 window;
    float scale;
    // Blocks that share the positions of a row, and the results that they leave: one each, or one for each tile of keys.
    u32 splits, results;
};

__device__ __forceinline__ u64 row_length(const Shape& shape) { return (u64)(GROUP + 2) * shape.kv_heads * HEAD_DIM; }

__device__ __forceinline__ u32 first_seen(const Shape& shape, u32 seen_to) {
    return shape.window != 0 && seen_to > shape.window ? seen_to - shape.window : 0;
}

// An element after rotation by (sine, cosine): `other` is its pair, negative for the first half. All kernels round alike.
__device__ __forceinline__ float turned(float element, float other, float2 by) { return __fmaf_rn(element, by.y, __fmul_rn(other, by.x)); }
// Element `at` of a head after rotation: it is paired with the element half a head away.
__device__ __forceinline__ float rotated(const ELEMENT* head, const float2* rotation, int at) {
    const float2 by = rotation[at % HALF];
    return at < HALF ? turned(widen(head[at]), -widen(head[at + HALF]), by) : turned(widen(head[at]), widen(head[at - HALF]), by);
}

// The cached keys or values of one head of a row's sequence.
struct Pages {
    const u32* table;
    u32 kv_heads, kv_head;

    // Where a position begins in the cache. The next positions of the same page follow.
    __device__ __forceinline__ u64 at(u32 position) const {
        return (((u64)table[position / PAGE_SIZE] * kv_heads + kv_head) * PAGE_SIZE + position % PAGE_SIZE) * HEAD_DIM;
    }
};
__device__ __forceinline__ Pages pages_of(const Shape& shape, const u32* batch, u32 row, u32 kv_head) {
    return {batch + shape.rows + (u64)(row / shape.run) * shape.pages, shape.kv_heads, kv_head};
}

// Puts one position's key, rotated, and its value into the cache.
__device__ __forceinline__ void put(
    const ELEMENT* key, const ELEMENT* value, const float2* rotation, ELEMENT* key_there, ELEMENT* value_there
) {
    for (int i = threadIdx.x; i < HEAD_DIM; i += blockDim.x) {
        key_there[i] = narrow<ELEMENT>(rotated(key, rotation, i));
        value_there[i] = value[i];
    }
}

// Grid: rows, key/value heads.
extern "C" __global__ void append(
    const ELEMENT* qkv, const float2* rotations, const u32* __restrict__ batch,
    ELEMENT* __restrict__ keys, ELEMENT* __restrict__ values, Shape shape
) {
    wait_for_previous();
    u32 row = blockIdx.x, kv_head = blockIdx.y;
    const ELEMENT* key = qkv + row * row_length(shape) + (u64)(GROUP * shape.kv_heads + kv_head) * HEAD_DIM;
    const u64 at = pages_of(shape, batch, row, kv_head).at(batch[row]);
    put(key, key + (u64)shape.kv_heads * HEAD_DIM, rotations + (u64)row * HALF, keys + at, values + at);
}

// The run of rows of a block. Grids are tiles of queries, each with its splits, and key/value heads of one run after the other.
struct RunOf {
    const ELEMENT* qkv;
    const float2* rotations;
    ELEMENT* out;
    u32 row, kv_head, position;
    Pages pages;

    __device__ __forceinline__ RunOf(const Shape& shape, const ELEMENT* qkv, const float2* rotations, const u32* batch, ELEMENT* out) {
        row = blockIdx.y / shape.kv_heads * shape.run;
        this->qkv = qkv + row * row_length(shape);
        this->rotations = rotations + (u64)row * HALF;
        this->out = out + (u64)row * GROUP * shape.kv_heads * HEAD_DIM;
        kv_head = blockIdx.y % shape.kv_heads;
        position = batch[row];
        pages = pages_of(shape, batch, row, kv_head);
    }
};

// Attention of one new position of each of some sequences on the tensor cores of Hopper. With a result for each tile it has the bits that
// `prefill` gives it.
// Compiled behind prefill_wgmma.cu, whose names it uses.

#ifdef WGMMA

#define DECODE_THREADS 128
// Blocks that share the query heads of a group.
constexpr u32 PARTS_OF_GROUP = ceil_div(GROUP, WARP_GROUP_QUERIES);

// Split-KV, as in flash decoding. Grid: x, splits of the tiles of keys; y, rows and parts of their groups of query heads. A block
// takes every gridDim.x-th tile. Blocks with the last tile put the new key and value into the cache. If there are several splits, each
// block leaves its weighted values and its softmax in `partial` or, if that has more results than blocks, each tile. The last block of a
// part to finish adds them in ascending order. `arrivals` is zero before and after.
extern "C" __global__ void __launch_bounds__(DECODE_THREADS, 2) decode(
    const ELEMENT* qkv, const float2* rotations, const u32* __restrict__ batch, ELEMENT* keys,
    ELEMENT* values, ELEMENT* __restrict__ out, float* partial, u32* arrivals, u32 results, Shape shape
) {
    extern __shared__ unsigned char memory[];
    const u32 queries = ((u32)__cvta_generic_to_shared(memory) + 1023) / 1024 * 1024;
    const u32 key_tile = queries + COLUMNS * QUERY_BYTES, value_tile = key_tile + TILE_BYTES;
    // Read before the wait: only copies write positions and page tables, and copies and kernels do not overlap.
    const u32 across = shape.kv_heads * PARTS_OF_GROUP, row = blockIdx.y / across, kv_head = blockIdx.y % across / PARTS_OF_GROUP;
    const u32 first_head = blockIdx.y % PARTS_OF_GROUP * WARP_GROUP_QUERIES, position = batch[row];
    const u32 first = first_seen(shape, position + 1) / WGMMA_KEYS, tiles = position / WGMMA_KEYS + 1 - first;
    // One tile always exists, and its block waits, so this kernel ends after the previous one. The next kernel relies on that.
    if (blockIdx.x >= tiles) return;
    const Pages pages = pages_of(shape, batch, row, kv_head);
    auto start_of = [&](u32 tile) { return (first + tile) * WGMMA_KEYS; };
    u64 offset = pages.at(start_of(blockIdx.x));
    // Read before the wait: earlier passes have written these positions, and a copy of `batch` came after them.
    load_tile<DECODE_THREADS>(key_tile, keys + offset, position - start_of(blockIdx.x));
    end_loads();
    load_tile<DECODE_THREADS>(value_tile, values + offset, position - start_of(blockIdx.x));
    end_loads();
    wait_for_previous();
    qkv += row * row_length(shape);
    rotations += (u64)row * HALF;
    const ELEMENT* const own_key = qkv + (u64)(GROUP * shape.kv_heads + kv_head) * HEAD_DIM;
    const ELEMENT* const own_value = own_key + (u64)shape.kv_heads * HEAD_DIM;
    const Rotated new_key(own_key, rotations, threadIdx.x % PAIRS);
    const Pack<u32, 4> new_value = *(const Pack<u32, 4>*)(own_value + threadIdx.x % (HEAD_DIM / 8) * 8);
    load_queries<DECODE_THREADS>(queries, qkv, rotations, shape, kv_head, first_head, GROUP);

    const int warp = threadIdx.x / 32;
    Queries mine(shape, first_head + warp * 16, GROUP, position);
    const bool is_alone = gridDim.x == 1 || tiles == 1, leaves_tiles = !is_alone && results > gridDim.x;
    const u64 at = (u64)row * shape.kv_heads + kv_head;
    // The weighted values of each result and head, then the softmax of each.
    float* const left = partial + at * results * GROUP * HEAD_DIM;
    Softmax* const left_softmax = (Softmax*)(partial + (u64)shape.rows * shape.kv_heads * results * GROUP * HEAD_DIM) + at * results * GROUP;
    auto leave = [&](u32 result, const Tile& values, const Softmax (&softmax)[2]) {
        #pragma unroll
        for (int r = 0; r < 2; r++) {
            if (mine.index[r] >= GROUP) continue;
            const u64 head = (u64)result * GROUP + mine.index[r];
            #pragma unroll
            for (int n = 0; n < HEAD_DIM / 8; n++)
                *(float2*)(left + head * HEAD_DIM + n * 8 + mine.column) = make_float2(values[4 * n + 2 * r], values[4 * n + 2 * r + 1]);
            if (threadIdx.x % 4 == 0) left_softmax[head] = softmax[r];
        }
    };
    Tile sums = {}, weighted, score;
    Softmax of_tile[2];
    Weights weights;
    for (u32 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const bool has_new = tile == tiles - 1, has_next = tile + gridDim.x < tiles;
        const u32 in_tile = position % WGMMA_KEYS;
        const u64 next_offset = has_next ? pages.at(start_of(tile + gridDim.x)) : 0;
        wait_for_loads<1>();
        if (has_new) {
            if (threadIdx.x < PAIRS) {
                const auto& [low, high] = new_key;
                store_part(key_tile + place(in_tile, threadIdx.x, KEY_BYTES), low);
                store_part(key_tile + place(in_tile, threadIdx.x + PAIRS, KEY_BYTES), high);
                ELEMENT* to = keys + offset + in_tile * HEAD_DIM + threadIdx.x * 8;
                *(Pack<u32, 4>*)to = {low[0], low[1], low[2], low[3]};
                *(Pack<u32, 4>*)(to + HALF) = {high[0], high[1], high[2], high[3]};
            }
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
            __syncthreads();
        }
        begin_products();
        score_tile(score, queries, key_tile);
        wait_for_all(score);
        __syncthreads();
        if (has_next) load_tile<DECODE_THREADS>(key_tile, keys + next_offset, position - start_of(tile + gridDim.x));
        end_loads();
        mine.weigh(score, start_of(tile), of_tile);
        mine.round(weights, score);
        wait_for_loads<1>();
        if (has_new) {
            if (threadIdx.x < HEAD_DIM / 8) {
                store_part(value_tile + place(in_tile, threadIdx.x, KEY_BYTES), new_value.of);
                *(Pack<u32, 4>*)(values + offset + in_tile * HEAD_DIM + threadIdx.x * 8) = new_value;
            }
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
            __syncthreads();
        }
        begin_products();
        weigh_values(weighted, weights, value_tile);
        wait_for_all(weighted);
        __syncthreads();
        if (has_next) load_tile<DECODE_THREADS>(value_tile, values + next_offset, position - start_of(tile + gridDim.x));
        end_loads();
        offset = next_offset;
        if (leaves_tiles) leave(tile, weighted, of_tile);
        else mine.add(sums, weighted, of_tile);
    }
    out += (u64)row * GROUP * shape.kv_heads * HEAD_DIM;
    if (is_alone) {
        mine.store(sums, out, shape, kv_head, GROUP);
        return;
    }
    if (!leaves_tiles) leave(blockIdx.x, sums, mine.all);

    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        last = atomicAdd(arrivals + blockIdx.y, 1) == min(gridDim.x, tiles) - 1;
        if (last) arrivals[blockIdx.y] = 0;
    }
    __syncthreads();
    if (!last) return;
    __threadfence();
    const u32 end = min(first_head + WARP_GROUP_QUERIES, GROUP), count = leaves_tiles ? tiles : min(gridDim.x, tiles);
    for (u32 i = first_head * HEAD_DIM + threadIdx.x * 4; i < end * HEAD_DIM; i += DECODE_THREADS * 4) {
        const u32 head = i / HEAD_DIM;
        Softmax all;
        float sums[4] = {};
        constexpr u32 IN_FLIGHT = 16;
        for (u32 from = 0; from < count; from += IN_FLIGHT) {
            float4 values[IN_FLIGHT];
            float2 softmax[IN_FLIGHT];
            #pragma unroll
            for (u32 t = 0; t < IN_FLIGHT; t++) {
                if (from + t >= count) continue;
                values[t] = __ldcg((const float4*)(left + (u64)(from + t) * GROUP * HEAD_DIM + i));
                softmax[t] = __ldcg((const float2*)(left_softmax + (u64)(from + t) * GROUP + head));
            }
            #pragma unroll
            for (u32 t = 0; t < IN_FLIGHT; t++) {
                if (from + t >= count) continue;
                float keep, share;
                all.add({softmax[t].x, softmax[t].y}, mine.scale, keep, share);
                sums[0] = Softmax::add_values(sums[0], keep, values[t].x, share);
                sums[1] = Softmax::add_values(sums[1], keep, values[t].y, share);
                sums[2] = Softmax::add_values(sums[2], keep, values[t].z, share);
                sums[3] = Softmax::add_values(sums[3], keep, values[t].w, share);
            }
        }
        const float share = 1.0f / all.weight;
        const u32 words[2] = {rounded_pair(sums[0] * share, sums[1] * share), rounded_pair(sums[2] * share, sums[3] * share)};
        *(Pack<u32, 2>*)(out + (u64)kv_head * GROUP * HEAD_DIM + i) = {words[0], words[1]};
    }
}

#endif

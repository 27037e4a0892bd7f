// Attention of one new position of each of some sequences on the tensor cores of Hopper. With a result for each tile it has the bits that
// `prefill` gives it.
// Compiled behind prefill_wgmma.cu, whose names it uses.

#ifdef WGMMA

#define DECODE_THREADS 128
// A block takes every `splits`-th tile of keys. Blocks with the last tile put the new key and value into the cache.
extern "C" __global__ void __launch_bounds__(DECODE_THREADS, 2) decode(
    const ELEMENT* qkv, const float2* rotations, const u32* __restrict__ batch, ELEMENT* keys,
    ELEMENT* values, ELEMENT* __restrict__ out, float* partial, u32* arrivals, Shape shape
) {
    extern __shared__ unsigned char memory[];
    const u32 queries = ((u32)__cvta_generic_to_shared(memory) + 1023) / 1024 * 1024;
    const u32 key_tile = queries + COLUMNS * QUERY_BYTES, value_tile = key_tile + TILE_BYTES;
    // Read before the wait: only copies write positions and page tables, and copies and kernels do not overlap.
    const RunOf run(shape, qkv, rotations, batch, out);
    const auto& [of_row, rotation, out_of_row, row, kv_head, position, pages] = run;
    const u32 split = blockIdx.x % shape.splits, first_head = blockIdx.x / shape.splits * WARP_GROUP_QUERIES;
    const u32 first = first_seen(shape, position + 1) / WGMMA_KEYS, tiles = position / WGMMA_KEYS + 1 - first;
    const u32 blocks = min(shape.splits, tiles);
    // One tile always exists, and its block waits, so this kernel ends after the previous one. The next kernel relies on that.
    if (split >= blocks) return;
    auto start_of = [&](u32 tile) { return (first + tile) * WGMMA_KEYS; };
    u64 offset = pages.at(start_of(split));
    // Read before the wait: earlier passes have written these positions, and a copy of `batch` came after them.
    load_tile<DECODE_THREADS>(key_tile, keys + offset, position - start_of(split));
    end_loads();
    load_tile<DECODE_THREADS>(value_tile, values + offset, position - start_of(split));
    end_loads();
    wait_for_previous();
    const ELEMENT* const own_key = of_row + (u64)(GROUP * shape.kv_heads + kv_head) * HEAD_DIM;
    const ELEMENT* const own_value = own_key + (u64)shape.kv_heads * HEAD_DIM;
    const Rotated new_key(own_key, rotation, threadIdx.x % PAIRS);
    const Pack<u32, 4> new_value = *(const Pack<u32, 4>*)(own_value + threadIdx.x % (HEAD_DIM / 8) * 8);
    load_queries<DECODE_THREADS>(queries, of_row, rotation, shape, kv_head, first_head, GROUP);

    const int warp = threadIdx.x / 32;
    Queries mine(shape, first_head + warp * 16, GROUP, position);
    const bool leaves_tiles = blocks > 1 && shape.results > shape.splits;
    const Splits splits(partial, shape, row, kv_head);
    Tile sums = {}, weighted, score;
    Softmax of_tile[2];
    Weights weights;
    for (u32 tile = split; tile < tiles; tile += shape.splits) {
        const bool has_new = tile == tiles - 1, has_next = tile + shape.splits < tiles;
        const u32 in_tile = position % WGMMA_KEYS;
        const u64 next_offset = has_next ? pages.at(start_of(tile + shape.splits)) : 0;
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
        if (has_next) load_tile<DECODE_THREADS>(key_tile, keys + next_offset, position - start_of(tile + shape.splits));
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
        if (has_next) load_tile<DECODE_THREADS>(value_tile, values + next_offset, position - start_of(tile + shape.splits));
        end_loads();
        offset = next_offset;
        if (leaves_tiles) mine.leave(splits, tile, weighted, of_tile);
        else mine.add(sums, weighted, of_tile);
    }
    if (blocks == 1) {
        mine.store(sums, out_of_row, shape, kv_head, GROUP);
        return;
    }
    if (!leaves_tiles) mine.leave(splits, split, sums, mine.all);
    if (!Splits::are_complete(arrivals, shape, blocks)) return;
    const u32 end = min(first_head + WARP_GROUP_QUERIES, GROUP);
    splits.add(out_of_row + (u64)kv_head * GROUP * HEAD_DIM, first_head, end, leaves_tiles ? tiles : blocks, mine.scale);
}

#endif

// Collectives through memory that all ranks of a node reach. Compiled with KIND, the number of the element type (0 f32, 2 f16,
// 3 bf16), RANKS, the size of the group (2 to 8), and RANK, the place of this rank. Includes nothing.
//
// Every rank has slots in its memory, one for each source. A rank pushes vectors of 16 bytes into the slots of its peers and
// polls its own. The data are the flag: a slot is *armed* with words that no rank ever pushes, and a vector is there when none
// of its four words is such a word. So no barrier and no fence is needed, and a torn store cannot be taken for a whole one. The
// reader arms the slot again.
//
// Slots have two phases, which calls use in turns. A peer pushes into a phase again two calls later. By then it has had this
// rank's vectors of the call between, which this rank pushed after the kernel that armed the phase again. So two phases are
// enough.
//
// Sums are in f32, in the order of the ranks, and rounded once: all ranks get the same bits, by either kernel.
//
// After the Lamport-style kernels of TensorRT-LLM and SGLang.

typedef unsigned long long u64;
typedef unsigned int u32;
typedef unsigned short u16;

// A NaN. Where data have it, another NaN takes its place.
#define ARMED 0xffffffffu
#define NOT_ARMED 0xfffeffffu

// Of a state.
#define PHASE 1u
#define GIVEN_UP 2u

#if KIND == 0
typedef u32 T;
#define PER 4
#else
typedef u16 T;
#define PER 8
#endif

struct Words { u32 w[4]; };
struct Sums { float f[PER]; };

// What the host passes.
struct Call {
    const T* in;
    T* out;
    // Elements: of the array, or of the chunk of each rank.
    u64 count;
    // Elements from one rank's chunk to the next, where there are chunks.
    u64 pitch;
    // The slots of each rank, as this GPU sees them.
    u64 slots[RANKS];
    // Bytes of one slot.
    u64 capacity;
    // A word for each block that a launch may have: the phase of the next call, and whether a call has been given up. All are the
    // same.
    u32* states;
    u32 blocks;
    // 1: give up. The host writes it, or a wait that has lasted for `patience` nanoseconds.
    u32* abort;
    u64 patience;
};

#if KIND == 2
__device__ __forceinline__ float widen(u16 x) { float y; asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x)); return y; }
__device__ __forceinline__ float low(u32 w) { return widen((u16)w); }
__device__ __forceinline__ float high(u32 w) { return widen((u16)(w >> 16)); }
__device__ __forceinline__ u32 pack(float x, float y) { u32 w; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(y), "f"(x)); return w; }
#elif KIND == 3
__device__ __forceinline__ float low(u32 w) { return __uint_as_float(w << 16); }
__device__ __forceinline__ float high(u32 w) { return __uint_as_float(w & 0xffff0000u); }
__device__ __forceinline__ u32 pack(float x, float y) { u32 w; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(y), "f"(x)); return w; }
#endif

__device__ __forceinline__ void add(Sums& s, const Words& x) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
#if KIND == 0
        s.f[i] += __uint_as_float(x.w[i]);
#else
        s.f[2 * i] += low(x.w[i]);
        s.f[2 * i + 1] += high(x.w[i]);
#endif
    }
}

__device__ __forceinline__ Words round_once(const Sums& s) {
    Words x;
#pragma unroll
    for (int i = 0; i < 4; i++) {
#if KIND == 0
        x.w[i] = __float_as_uint(s.f[i]);
#else
        x.w[i] = pack(s.f[2 * i], s.f[2 * i + 1]);
#endif
    }
    return x;
}

__device__ __forceinline__ Words to_push(Words x) {
#pragma unroll
    for (int i = 0; i < 4; i++) if (x.w[i] == ARMED) x.w[i] = NOT_ARMED;
    return x;
}

__device__ __forceinline__ bool is_there(const Words& x) {
    return x.w[0] != ARMED && x.w[1] != ARMED && x.w[2] != ARMED && x.w[3] != ARMED;
}

__device__ __forceinline__ Words poll(u64 at) {
    Words x;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(x.w[0]), "=r"(x.w[1]), "=r"(x.w[2]), "=r"(x.w[3]) : "l"(at) : "memory");
    return x;
}

__device__ __forceinline__ void push(u64 at, const Words& x) {
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1,%2,%3,%4};" :: "l"(at), "r"(x.w[0]), "r"(x.w[1]), "r"(x.w[2]), "r"(x.w[3]) : "memory");
}

__device__ __forceinline__ void arm(u64 at) {
    asm volatile("st.global.v4.u32 [%0], {%1,%1,%1,%1};" :: "l"(at), "r"(ARMED) : "memory");
}

// Vector v of `count` elements; those past the end are zero.
__device__ __forceinline__ Words load(const T* from, u64 count, u64 v, bool aligned) {
    Words x;
    if (aligned && (v + 1) * PER <= count) {
        const T* at = from + v * PER;
        asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(x.w[0]), "=r"(x.w[1]), "=r"(x.w[2]), "=r"(x.w[3]) : "l"(at) : "memory");
        return x;
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        x.w[i] = 0;
#pragma unroll
        for (int j = 0; j < PER / 4; j++) {
            u64 at = v * PER + i * (PER / 4) + j;
            if (at < count) x.w[i] |= (u32)((volatile const T*)from)[at] << (16 * j);
        }
    }
    return x;
}

__device__ __forceinline__ void store(T* to, u64 count, u64 v, const Words& x, bool aligned) {
    if (aligned && (v + 1) * PER <= count) {
        T* at = to + v * PER;
        asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" :: "l"(at), "r"(x.w[0]), "r"(x.w[1]), "r"(x.w[2]), "r"(x.w[3]) : "memory");
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < PER / 4; j++) {
            u64 at = v * PER + i * (PER / 4) + j;
            if (at < count) to[at] = (T)(x.w[i] >> (16 * j));
        }
}

// Whether to give up a wait; looks at the clock and at the host's word now and then only.
__device__ __forceinline__ bool give_up(const Call& call, u32& tries, u64& until) {
    if ((++tries & 1023) != 0) return false;
    u64 now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    if (until == 0) until = now + call.patience;
    u32 told;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(told) : "l"(call.abort) : "memory");
    if (told) return true;
    if (now < until) return false;
    asm volatile("st.relaxed.sys.global.u32 [%0], 1;" :: "l"(call.abort) : "memory");
    return true;
}

// Waits for the vectors of all peers at `at` + source × capacity, adds them and this rank's own, and arms the slots again. False:
// it gave up.
__device__ __forceinline__ bool reduce(const Call& call, u64 at, const Words& own, Words& sum) {
    Words x[RANKS];
    u32 tries = 0;
    u64 until = 0;
    for (bool all = false; !all;) {
        all = true;
#pragma unroll
        for (int r = 0; r < RANKS; r++) if (r != RANK) x[r] = poll(at + r * call.capacity);
#pragma unroll
        for (int r = 0; r < RANKS; r++) if (r != RANK) all &= is_there(x[r]);
        if (!all && give_up(call, tries, until)) return false;
    }
    Sums sums;
#pragma unroll
    for (int i = 0; i < PER; i++) sums.f[i] = 0.0f;
#pragma unroll
    for (int r = 0; r < RANKS; r++) add(sums, r == RANK ? own : x[r]);
#pragma unroll
    for (int r = 0; r < RANKS; r++) if (r != RANK) arm(at + r * call.capacity);
    sum = round_once(sums);
    return true;
}

// Waits for one vector of a peer, and arms its slot again. False: it gave up.
__device__ __forceinline__ bool receive(const Call& call, u64 at, Words& x) {
    u32 tries = 0;
    u64 until = 0;
    for (x = poll(at); !is_there(x); x = poll(at))
        if (give_up(call, tries, until)) return false;
    arm(at);
    return true;
}

// Half of the blocks that fit a multiprocessor are launched: a launch of another group finds room beside them.
#define RESIDENT __launch_bounds__(512, RANKS == 2 ? 4 : 2)

// What every kernel begins and ends with. After a call that was given up nothing is pushed or stored: peers must not take it for
// a result. It may be launched before the kernel in front of it has ended: nothing is read
// before that one's memory is there. What comes next may be launched as soon as all blocks are here.
#if __CUDA_ARCH__ >= 900
#define OVERLAP                                                     \
    asm volatile("griddepcontrol.wait;" ::: "memory");              \
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#else
#define OVERLAP
#endif
#define BEGIN                                                                                          \
    OVERLAP                                                                                            \
    const u32 state = *(volatile u32*)(call.states + blockIdx.x);                                      \
    if (state & GIVEN_UP) return;                                                                      \
    const u64 phase = state & PHASE;                                                                   \
    bool is_lost = false;                                                                              \
    const u64 first = (u64)blockIdx.x * blockDim.x + threadIdx.x, stride = (u64)gridDim.x * blockDim.x; \
    const u64 vectors = (call.count + PER - 1) / PER;                                                  \
    const bool aligned = (((u64)call.in | (u64)call.out) & 15) == 0;

// All states, also those of blocks that this launch lacks; each block changes the phase of its part.
#define END                                                                                             \
    if (__syncthreads_or(is_lost)) {                                                                    \
        for (u32 i = threadIdx.x; i < call.blocks; i += blockDim.x) atomicOr(call.states + i, GIVEN_UP); \
        return;                                                                                         \
    }                                                                                                   \
    for (u32 i = blockIdx.x + threadIdx.x * gridDim.x; i < call.blocks; i += gridDim.x * blockDim.x)    \
        atomicXor(call.states + i, PHASE);

// Everybody sends everything to everybody. Slots: [phase][source].
extern "C" __global__ void RESIDENT one_shot(const Call call) {
    BEGIN
    const u64 base = phase * RANKS * call.capacity;
    Words own;
    for (u64 v = first; v < vectors; v += stride) {
        own = to_push(load(call.in, call.count, v, aligned));
#pragma unroll
        for (int d = 1; d < RANKS; d++) {
            const int peer = (RANK + d) % RANKS;
            push(call.slots[peer] + base + RANK * call.capacity + v * 16, own);
        }
    }
    const bool is_one_each = vectors <= stride;
    for (u64 v = first; v < vectors; v += stride) {
        if (!is_one_each) own = to_push(load(call.in, call.count, v, aligned));
        Words sum;
        is_lost = !reduce(call, call.slots[RANK] + base + v * 16, own, sum);
        if (is_lost) break;
        store(call.out, call.count, v, sum, aligned);
    }
    END
}

// The kernels in two steps: reduce-scatter and all-gather. Each thread is DEPTH vectors ahead with what it sends of what it
// receives, so that the links carry data all the time. Slots: [scattered, gathered][phase][source].
#define DEPTH 2
#define SCATTERED (phase * RANKS * call.capacity)
#define GATHERED ((2 + phase) * RANKS * call.capacity)

extern "C" __global__ void RESIDENT two_shot(const Call call) {
    BEGIN
    const u64 chunk = (vectors + RANKS - 1) / RANKS, steps = (chunk + stride - 1) / stride;
    for (u64 step = 0; step < steps + 2 * DEPTH && !is_lost; step++) {
        u64 v = step * stride + first;
        if (step < steps && v < chunk) {
#pragma unroll
            for (int d = 1; d < RANKS; d++) {
                const int peer = (RANK + d) % RANKS;
                if (peer * chunk + v < vectors)
                    push(call.slots[peer] + SCATTERED + RANK * call.capacity + v * 16, to_push(load(call.in, call.count, peer * chunk + v, aligned)));
            }
        }
        v = (step - DEPTH) * stride + first;
        if (step >= DEPTH && step < steps + DEPTH && v < chunk && RANK * chunk + v < vectors) {
            Words own = to_push(load(call.in, call.count, RANK * chunk + v, aligned)), sum;
            is_lost = !reduce(call, call.slots[RANK] + SCATTERED + v * 16, own, sum);
            if (is_lost) break;
            sum = to_push(sum);
#pragma unroll
            for (int d = 1; d < RANKS; d++) {
                const int peer = (RANK + d) % RANKS;
                push(call.slots[peer] + GATHERED + RANK * call.capacity + v * 16, sum);
            }
            store(call.out, call.count, RANK * chunk + v, sum, aligned);
        }
        v = (step - 2 * DEPTH) * stride + first;
        if (step >= 2 * DEPTH && v < chunk) {
#pragma unroll
            for (int d = 1; d < RANKS; d++) {
                const int peer = (RANK + d) % RANKS;
                Words x;
                if (peer * chunk + v >= vectors || is_lost) continue;
                is_lost = !receive(call, call.slots[RANK] + GATHERED + peer * call.capacity + v * 16, x);
                if (!is_lost) store(call.out, call.count, peer * chunk + v, x, aligned);
            }
        }
    }
    END
}

// `in`: a chunk for each rank. `out`: the sum of everybody's chunk for this rank.
extern "C" __global__ void RESIDENT reduce_scatter(const Call call) {
    BEGIN
    const u64 steps = (vectors + stride - 1) / stride;
    const bool whole = aligned && (call.pitch % PER) == 0;
    for (u64 step = 0; step < steps + DEPTH && !is_lost; step++) {
        u64 v = step * stride + first;
        if (step < steps && v < vectors) {
#pragma unroll
            for (int d = 1; d < RANKS; d++) {
                const int peer = (RANK + d) % RANKS;
                push(call.slots[peer] + SCATTERED + RANK * call.capacity + v * 16, to_push(load(call.in + peer * call.pitch, call.count, v, whole)));
            }
        }
        v = (step - DEPTH) * stride + first;
        if (step >= DEPTH && v < vectors) {
            Words own = to_push(load(call.in + RANK * call.pitch, call.count, v, whole)), sum;
            is_lost = !reduce(call, call.slots[RANK] + SCATTERED + v * 16, own, sum);
            if (!is_lost) store(call.out, call.count, v, sum, whole);
        }
    }
    END
}

// `in`: this rank's chunk. `out`: those of all ranks.
extern "C" __global__ void RESIDENT all_gather(const Call call) {
    BEGIN
    const u64 steps = (vectors + stride - 1) / stride;
    const bool whole = aligned && (call.pitch % PER) == 0;
    for (u64 step = 0; step < steps + DEPTH && !is_lost; step++) {
        u64 v = step * stride + first;
        if (step < steps && v < vectors) {
            const Words own = to_push(load(call.in, call.count, v, whole));
#pragma unroll
            for (int d = 1; d < RANKS; d++) {
                const int peer = (RANK + d) % RANKS;
                push(call.slots[peer] + GATHERED + RANK * call.capacity + v * 16, own);
            }
            store(call.out + RANK * call.pitch, call.count, v, own, whole);
        }
        v = (step - DEPTH) * stride + first;
        if (step >= DEPTH && v < vectors) {
#pragma unroll
            for (int d = 1; d < RANKS; d++) {
                const int peer = (RANK + d) % RANKS;
                Words x;
                if (is_lost) continue;
                is_lost = !receive(call, call.slots[RANK] + GATHERED + peer * call.capacity + v * 16, x);
                if (!is_lost) store(call.out + peer * call.pitch, call.count, v, x, whole);
            }
        }
    }
    END
}

// What add_norm does with the sum.
struct Norm {
    // The sum is added to it.
    T* residual;
    const float* weight;
    // Elements of a row: whole vectors, no more than a cluster has threads.
    u32 columns;
    float epsilon;
};

__device__ __forceinline__ u32 cluster_blocks() { u32 n; asm("mov.u32 %0, %cluster_nctaid.x;" : "=r"(n)); return n; }
__device__ __forceinline__ u32 block_in_cluster() { u32 i; asm("mov.u32 %0, %cluster_ctaid.x;" : "=r"(i)); return i; }

__device__ __forceinline__ float sum_of_warp(float x) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffff, x, offset);
    return x;
}

__device__ __forceinline__ void load_weight(float (&weight)[PER], const float* from, bool aligned) {
#pragma unroll
    for (int i = 0; i < PER; i += 4) {
        if (aligned) {
            asm volatile("ld.global.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(weight[i]), "=f"(weight[i + 1]), "=f"(weight[i + 2]), "=f"(weight[i + 3]) : "l"(from + i) : "memory");
        } else {
            for (int j = i; j < i + 4; j++) weight[j] = from[j];
        }
    }
}

// The sum over all threads of a cluster, on all of them, in an order that depends on nothing but its shape. `sums`: one for each
// warp of the cluster, which nobody reads any more.
__device__ __forceinline__ float sum_of_cluster(float x, float* sums) {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32, blocks = cluster_blocks();
    x = sum_of_warp(x);
    if (blocks == 1) {
        if (lane == 0) sums[warp] = x;
        __syncthreads();
    } else {
        if (lane < blocks) {
            u32 here = (u32)__cvta_generic_to_shared(sums + block_in_cluster() * warps + warp), there;
            asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(lane));
            asm volatile("st.shared::cluster.f32 [%0], %1;" :: "r"(there), "f"(x) : "memory");
        }
        asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
    }
    float sum = 0.0f;
    for (u32 i = lane; i < blocks * warps; i += 32) sum += ((volatile float*)sums)[i];
    return sum_of_warp(sum);
}

// One-shot; then `residual` += sum, and `out` = residual / sqrt(mean(residual²) + epsilon) × weight, row by row. Each step is
// rounded as if a kernel of its own did it. A cluster takes a row at a time, and each of its threads a vector.
extern "C" __global__ void __launch_bounds__(512) add_norm(const Call call, const Norm norm) {
    BEGIN
    __shared__ float sums[2][128];
    const u64 base = phase * RANKS * call.capacity;
    const u32 blocks = cluster_blocks(), width = norm.columns / PER;
    const u32 mine = block_in_cluster() * blockDim.x + threadIdx.x;
    const u64 rows = vectors / width, cluster = blockIdx.x / blocks, clusters = gridDim.x / blocks;
    const bool whole = aligned && (((u64)norm.residual | (u64)norm.weight) & 15) == 0;
    Words own;
    for (u64 row = cluster; row < rows; row += clusters) {
        if (mine >= width) continue;
        const u64 v = row * width + mine;
        own = to_push(load(call.in, call.count, v, whole));
#pragma unroll
        for (int d = 1; d < RANKS; d++) {
            const int peer = (RANK + d) % RANKS;
            push(call.slots[peer] + base + RANK * call.capacity + v * 16, own);
        }
    }
    float weight[PER];
    if (cluster < rows && mine < width) load_weight(weight, norm.weight + mine * PER, whole);
    u32 turn = 0;
    for (u64 row = cluster; row < rows; row += clusters, turn ^= 1) {
        const u64 v = row * width + mine;
        Sums x = {};
        float squares = 0.0f;
        if (mine < width && !is_lost) {
            Words sum;
            if (clusters < rows) own = to_push(load(call.in, call.count, v, whole));
            add(x, load(norm.residual, call.count, v, whole));
            is_lost = !reduce(call, call.slots[RANK] + base + v * 16, own, sum);
            add(x, sum);
            sum = round_once(x);
            if (!is_lost) store(norm.residual, call.count, v, sum, whole);
            x = {};
            add(x, sum);
#pragma unroll
            for (int e = 0; e < PER; e++) squares += x.f[e] * x.f[e];
        }
        const float scale = 1.0f / sqrtf(sum_of_cluster(squares, sums[turn]) / norm.columns + norm.epsilon);
        if (mine < width && !is_lost) {
#pragma unroll
            for (int e = 0; e < PER; e++) x.f[e] = x.f[e] * scale * weight[e];
            store(call.out, call.count, v, round_once(x), whole);
        }
    }
    END
}

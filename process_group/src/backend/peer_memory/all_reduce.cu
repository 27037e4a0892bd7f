// All-reduce (sum) through memory that all ranks of a node reach. Compiled with KIND, the number of the element type (0 f32,
// 2 f16, 3 bf16), RANKS, the size of the group (2 to 8), and RANK, the place of this rank. Includes nothing.
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
    u64 count;
    // The slots of each rank, as this GPU sees them.
    u64 slots[RANKS];
    // Bytes of one slot.
    u64 capacity;
    // One number for each block that a launch may have; all are the same: how many calls there have been.
    u32* calls;
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

// A vector of the input; elements past the end are zero.
__device__ __forceinline__ Words load(const Call& call, u64 v, bool aligned) {
    Words x;
    if (aligned && (v + 1) * PER <= call.count) {
        const T* at = call.in + v * PER;
        asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(x.w[0]), "=r"(x.w[1]), "=r"(x.w[2]), "=r"(x.w[3]) : "l"(at) : "memory");
        return x;
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        x.w[i] = 0;
#pragma unroll
        for (int j = 0; j < PER / 4; j++) {
            u64 at = v * PER + i * (PER / 4) + j;
            if (at < call.count) x.w[i] |= (u32)((volatile const T*)call.in)[at] << (16 * j);
        }
    }
    return x;
}

__device__ __forceinline__ void store(const Call& call, u64 v, const Words& x, bool aligned) {
    if (aligned && (v + 1) * PER <= call.count) {
        T* at = call.out + v * PER;
        asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" :: "l"(at), "r"(x.w[0]), "r"(x.w[1]), "r"(x.w[2]), "r"(x.w[3]) : "memory");
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < PER / 4; j++) {
            u64 at = v * PER + i * (PER / 4) + j;
            if (at < call.count) call.out[at] = (T)(x.w[i] >> (16 * j));
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

// Waits for the vectors of all peers at `at` + source × capacity, adds them and this rank's own, and arms the slots again.
__device__ __forceinline__ Words reduce(const Call& call, u64 at, const Words& own) {
    Words x[RANKS];
    u32 tries = 0;
    u64 until = 0;
    for (bool all = false; !all;) {
        all = true;
#pragma unroll
        for (int r = 0; r < RANKS; r++) if (r != RANK) x[r] = poll(at + r * call.capacity);
#pragma unroll
        for (int r = 0; r < RANKS; r++) if (r != RANK) all &= is_there(x[r]);
        if (!all && give_up(call, tries, until)) break;
    }
    Sums sums;
#pragma unroll
    for (int i = 0; i < PER; i++) sums.f[i] = 0.0f;
#pragma unroll
    for (int r = 0; r < RANKS; r++) add(sums, r == RANK ? own : x[r]);
#pragma unroll
    for (int r = 0; r < RANKS; r++) if (r != RANK) arm(at + r * call.capacity);
    return round_once(sums);
}

// What every kernel begins and ends with. It may be launched before the kernel in front of it has ended: nothing is read
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
    const u32 calls = *(volatile u32*)(call.calls + blockIdx.x);                                       \
    const u64 phase = calls & 1;                                                                       \
    const u64 first = (u64)blockIdx.x * blockDim.x + threadIdx.x, stride = (u64)gridDim.x * blockDim.x; \
    const u64 vectors = (call.count + PER - 1) / PER;                                                  \
    const bool aligned = (((u64)call.in | (u64)call.out) & 15) == 0;

// All numbers, also those of blocks that this launch lacks.
#define END                                                                                             \
    __syncthreads();                                                                                    \
    for (u32 i = blockIdx.x + threadIdx.x * gridDim.x; i < call.blocks; i += gridDim.x * blockDim.x)    \
        call.calls[i] = calls + 1;

// Everybody sends everything to everybody. Slots: [phase][source].
extern "C" __global__ void __launch_bounds__(1024) one_shot(const Call call) {
    BEGIN
    const u64 base = phase * RANKS * call.capacity;
    Words own;
    for (u64 v = first; v < vectors; v += stride) {
        own = to_push(load(call, v, aligned));
#pragma unroll
        for (int d = 1; d < RANKS; d++) {
            const int peer = (RANK + d) % RANKS;
            push(call.slots[peer] + base + RANK * call.capacity + v * 16, own);
        }
    }
    const bool is_one_each = vectors <= stride;
    for (u64 v = first; v < vectors; v += stride) {
        if (!is_one_each) own = to_push(load(call, v, aligned));
        store(call, v, reduce(call, call.slots[RANK] + base + v * 16, own), aligned);
    }
    END
}

// Reduce-scatter, then all-gather. Each thread is DEPTH steps ahead with the scattering of what it reduces, and as far with that
// of what it gathers, so that the links carry all three at once. Slots: [scattered, gathered][phase][source].
#define DEPTH 2
extern "C" __global__ void __launch_bounds__(1024) two_shot(const Call call) {
    BEGIN
    const u64 chunk = (vectors + RANKS - 1) / RANKS, steps = (chunk + stride - 1) / stride;
    const u64 scattered = phase * RANKS * call.capacity, gathered = (2 + phase) * RANKS * call.capacity;
    for (u64 step = 0; step < steps + 2 * DEPTH; step++) {
        u64 v = step * stride + first;
        if (step < steps && v < chunk) {
#pragma unroll
            for (int d = 1; d < RANKS; d++) {
                const int peer = (RANK + d) % RANKS;
                if (peer * chunk + v < vectors)
                    push(call.slots[peer] + scattered + RANK * call.capacity + v * 16, to_push(load(call, peer * chunk + v, aligned)));
            }
        }
        v = (step - DEPTH) * stride + first;
        if (step >= DEPTH && step < steps + DEPTH && v < chunk && RANK * chunk + v < vectors) {
            Words own = to_push(load(call, RANK * chunk + v, aligned));
            Words sum = to_push(reduce(call, call.slots[RANK] + scattered + v * 16, own));
#pragma unroll
            for (int d = 1; d < RANKS; d++) {
                const int peer = (RANK + d) % RANKS;
                push(call.slots[peer] + gathered + RANK * call.capacity + v * 16, sum);
            }
            store(call, RANK * chunk + v, sum, aligned);
        }
        v = (step - 2 * DEPTH) * stride + first;
        if (step >= 2 * DEPTH && v < chunk) {
#pragma unroll
            for (int d = 1; d < RANKS; d++) {
                const int peer = (RANK + d) % RANKS;
                if (peer * chunk + v >= vectors) continue;
                const u64 at = call.slots[RANK] + gathered + peer * call.capacity + v * 16;
                Words x = poll(at);
                u32 tries = 0;
                u64 until = 0;
                while (!is_there(x) && !give_up(call, tries, until)) x = poll(at);
                store(call, peer * chunk + v, x, aligned);
                arm(at);
            }
        }
    }
    END
}

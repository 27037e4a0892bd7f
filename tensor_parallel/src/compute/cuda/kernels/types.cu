// The element types and what every kernel needs of them. Put before each kernel file; nothing is included, so that no
// toolkit is needed where this is compiled.
//
// ELEMENT is the type of activations, OTHER that of a second operand; both are macros, set to f32, f16 or bf16.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

typedef float f32;
struct f16 { u16 bits; };
struct bf16 { u16 bits; };

__device__ __forceinline__ float widen(f32 x) { return x; }
__device__ __forceinline__ float widen(bf16 x) { return __uint_as_float((u32)x.bits << 16); }
__device__ __forceinline__ float widen(f16 x) {
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(x.bits));
    return wide;
}

// The nearest value of another type, ties to even.
template <typename T> struct Narrow;
template <> struct Narrow<f32> {
    static __device__ __forceinline__ f32 of(float x) { return x; }
};
template <> struct Narrow<f16> {
    static __device__ __forceinline__ f16 of(float x) {
        f16 half;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half.bits) : "f"(x));
        return half;
    }
};
template <> struct Narrow<bf16> {
    static __device__ __forceinline__ bf16 of(float x) {
        bf16 half;
        u32 bits = __float_as_uint(x);
        // A NaN must not round up to infinity.
        u32 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
        half.bits = x != x ? (u16)((bits >> 16) | 0x40) : (u16)rounded;
        return half;
    }
};
template <typename T> __device__ __forceinline__ T narrow(float x) { return Narrow<T>::of(x); }

// Lets the next kernel start once all blocks of this one have called this or ended (programmatic dependent launch). It may be called
// before the wait: the next kernel waits for the end of this one, which waits for that of the one before.
__device__ __forceinline__ void launch_next() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Every kernel calls this before it writes, and before it reads what an earlier kernel may have written, unless a copy was enqueued in
// between. It waits until the previous kernel has ended and its writes are visible, then lets the next one start. The previous kernel
// waited for its own predecessor, so all earlier kernels have ended as well.
//
// Data that a kernel reads after the wait is not `__restrict__`: the compiler could read it before.
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    launch_next();
}

__device__ __forceinline__ float gated(float gate, float up) { return gate / (1.0f + expf(-gate)) * up; }

// N elements that are loaded and stored as one.
template <typename T, int N> struct alignas(sizeof(T) * N) Pack { T of[N]; };
// As many elements as one access can have.
template <typename T> struct Wide { static constexpr int N = 16 / sizeof(T); };

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
__host__ __device__ constexpr int least(int a, int b) { return a < b ? a : b; }
__host__ __device__ constexpr int greatest(int a, int b) { return a > b ? a : b; }
// The smallest power of two that is not below n.
__host__ __device__ constexpr int power_of_two(int n, int from = 1) { return from >= n ? from : power_of_two(n, 2 * from); }

// The sum of leaves: of neighbours in pairs while their number is even, then of one after the other. Changes `leaves`.
template <typename T, int COUNT, typename Add> __device__ __forceinline__ T sum_of_tree(T (&leaves)[COUNT], Add add) {
    constexpr int PAIRS = COUNT & -COUNT;
    #pragma unroll
    for (int apart = 1; apart < COUNT; apart += apart < PAIRS ? apart : PAIRS) {
        #pragma unroll
        for (int l = 0; l < COUNT; l += apart < PAIRS ? 2 * apart : COUNT) leaves[l] = add(leaves[l], leaves[l + apart]);
    }
    return leaves[0];
}

__device__ __forceinline__ float sum_of_warp(float x) {
    for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffff, x, offset);
    return x;
}

// The sum over all warps of a block, on all threads, where x is the same in a warp.
__device__ __forceinline__ float sum_of_warps(float x) {
    __shared__ float sums[32];
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = x;
    __syncthreads();
    x = threadIdx.x % 32 < blockDim.x / 32 ? sums[threadIdx.x % 32] : 0.0f;
    return sum_of_warp(x);
}

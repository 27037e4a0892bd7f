// f32 values as 16-bit ones, and back. Compiled with HALF, 1 for f16 and 0 for bf16. Includes nothing.

typedef unsigned long long u64;
typedef unsigned int u32;
typedef unsigned short u16;

#if HALF
__device__ u16 narrow(float x) { u16 y; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x)); return y; }
__device__ float widen(u16 x) { float y; asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x)); return y; }
#else
__device__ u16 narrow(float x) {
    const u32 bits = __float_as_uint(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (u16)(bits >> 16) | 0x40;
    return (u16)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
__device__ float widen(u16 x) { return __uint_as_float((u32)x << 16); }
#endif

#define EACH(i) for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += (u64)gridDim.x * blockDim.x)

extern "C" __global__ void to_wire(const float* from, u16* to, u64 count) { EACH(i) to[i] = narrow(from[i]); }

extern "C" __global__ void from_wire(const u16* from, float* to, u64 count, float divisor) {
    EACH(i) to[i] = widen(from[i]) / divisor;
}

// The primitives of the fast path, one set per instruction set, all with the same meaning.
//
// A vector holds LANES rows: lane r belongs to row r of a group, so no sum ever crosses lanes and
// the float order is the same whatever the width. Integer primitives are exact; float primitives
// are one IEEE operation each, never fused.
//
//   vi     LANES x i32, or 2*LANES x i16, or 4*LANES x i8: rows side by side
//   vf     LANES x f32
//   xq     four int8 activations, given to every row
//   Part   sum of a few columns per row          Scale   integer scale of a sub-block per row
//          (u8 weights); sub_dot, sub_end: the same for i8 weights, x86 scales at every step
//   Signed sum of products with i8 weights, -128 included
//   f8     eight f32 lanes, lane = column mod 8: for F32 and F16 weights
//
// The products differ most. x86 has pmaddubsw (u8 x i8 -> i16 pairs), so a Part stays i16 pairs
// there and the scale is applied while widening; NEON has sdot; plain wasm multiplies i16, so its
// activations are stored widened, even columns first. Relaxed wasm names either of the first two.
#ifndef EXPERT_SIMD_H
#define EXPERT_SIMD_H

#include <stddef.h>
#include <stdint.h>

#define INLINE static inline __attribute__((always_inline))
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#define NO_UNROLL _Pragma("clang loop unroll(disable)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#define NO_UNROLL _Pragma("GCC unroll 1")
#endif

#define EACH(i, n) UNROLL for (int i = 0; i < (n); i++) // n is a constant once inlined
#define EACH_ROLLED(i, n) NO_UNROLL for (int i = 0; i < (n); i++)

INLINE int32_t load_i32(const void *p) {
    int32_t v;
    __builtin_memcpy(&v, p, 4);
    return v;
}

// PIN(v): v is computed here, and no load moves across. A compiler for wasm takes registers for
// endless: it gathers the loads of a whole block before the first product, and the engine, with 15
// registers of the machine, spills them all. A pinned pointer is one that it knows nothing of, so
// that constant offsets stay in the loads.
#if defined(__wasm__)
#define PIN(v) __asm__ volatile("" : "+r"(v) : : "memory")
#else
#define PIN(v) (void)(v)
#endif

#if defined(__wasm__)
#include "simd/wasm.h"
#elif defined(__AVX512VNNI__)
#include "simd/avx512vnni.h"
#elif defined(__AVX2__)
#include "simd/avx2.h"
#elif defined(__SSE4_1__)
#include "simd/sse41.h"
#elif defined(__ARM_NEON)
#include "simd/neon.h"
#else
#error "no instruction set chosen: define EXPERT_SCALAR for the reference"
#endif

#if !defined(SIGNED_IS_TWO_SUMS)
typedef vi Signed;
INLINE Signed signed_zero(void) { return vi_zero(); }
INLINE Signed signed_dot(Signed sum, xq x, vi w) { return dot_s8(sum, x, w); }
INLINE vi signed_sum(Signed sum) { return sum; }
#define PIN_SIGNED(sum) PIN(sum)
#endif

#if !defined(HAS_TINY_F16) // vf_of_f16, fast for subnormals, too
INLINE vf vf_of_tiny_f16(const void *p) { return vf_of_f16(p); }
#endif

INLINE vi low_nibbles(vi w) { return vi_and_bytes(w, 0x0f); }
INLINE vi high_nibbles(vi w) { return vi_and_bytes(vi_shr16(w, 4), 0x0f); }

#endif

// Which build this CPU can run. The scalar library runs anywhere, so it is the one to ask.
#include "expert.h"

#if defined(__x86_64__)
#include <cpuid.h>

static uint64_t enabled_state(void) { // XGETBV: which registers the operating system saves
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (uint64_t)high << 32 | low;
}

static int32_t level(void) {
    uint32_t a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_SSE4_1) || !(c & bit_SSSE3)) return 0;
    const int avx =
        (c & bit_AVX) && (c & bit_OSXSAVE) && (c & bit_F16C) && (enabled_state() & 6) == 6;
    if (!avx || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 1;
    // The avx2 library is compiled for x86-64-v3, which has BMI as well.
    return (b & bit_AVX2) && (b & bit_BMI) && (b & bit_BMI2) ? 2 : 1;
}
#else
static int32_t level(void) { return 1; }
#endif

EXPERT_EXPORT(expert_cpu_level) int32_t expert_cpu_level(void) { return level(); }

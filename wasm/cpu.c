// Which build this is, and which this CPU can run. The scalar library runs anywhere, so it is the one
// to ask.
#include "formats/format.h"

EXPERT_EXPORT(expert_abi_version) int32_t expert_abi_version(void) { return EXPERT_ABI_VERSION; }

#if defined(EXPERT_SCALAR)
#define BUILD_NAME "scalar"
#endif
EXPERT_EXPORT(expert_build) const char *expert_build(void) { return BUILD_NAME; }

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
    // The avx2 library is compiled for x86-64-v3, which has BMI as well; avx512vnni for x86-64-v4.
    if (!(b & bit_AVX2) || !(b & bit_BMI) || !(b & bit_BMI2)) return 1;
    const uint32_t wide = bit_AVX512F | bit_AVX512BW | bit_AVX512CD | bit_AVX512DQ | bit_AVX512VL;
    return (b & wide) == wide && (c & bit_AVX512VNNI) && (enabled_state() & 0xe6) == 0xe6 ? 3 : 2;
}
#else
static int32_t level(void) { return 1; }
#endif

EXPERT_EXPORT(expert_cpu_level) int32_t expert_cpu_level(void) { return level(); }

EXPERT_EXPORT(expert_read_memory)
uint32_t expert_read_memory(const uint8_t *data, size_t size_bytes) {
    uint32_t sum[16] = {0}; // sixteen sums, so that the compiler reads as wide as it can
    for (size_t i = 0; i + 64 <= size_bytes; i += 64) {
        uint32_t words[16];
        __builtin_memcpy(words, data + i, 64);
        for (int k = 0; k < 16; k++) sum[k] += words[k];
    }
    uint32_t total = 0;
    for (int k = 0; k < 16; k++) total += sum[k];
    return total;
}

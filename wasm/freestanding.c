// The three functions a compiler may call by itself, for targets without a C library. With bulk
// memory the first two become one instruction each.
#if defined(__wasm__)
#include <stddef.h>
#include <stdint.h>

void *memcpy(void *restrict to, const void *restrict from, size_t count);
void *memset(void *to, int value, size_t count);
int memcmp(const void *a, const void *b, size_t count);

void *memcpy(void *restrict to, const void *restrict from, size_t count) {
    for (size_t i = 0; i < count; i++) ((uint8_t *)to)[i] = ((const uint8_t *)from)[i];
    return to;
}

void *memset(void *to, int value, size_t count) {
    for (size_t i = 0; i < count; i++) ((uint8_t *)to)[i] = (uint8_t)value;
    return to;
}

int memcmp(const void *a, const void *b, size_t count) {
    for (size_t i = 0; i < count; i++) {
        const int difference = ((const uint8_t *)a)[i] - ((const uint8_t *)b)[i];
        if (difference) return difference;
    }
    return 0;
}
#endif

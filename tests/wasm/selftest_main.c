// Prints the digest of every known answer of the kernel, as a program by itself, so that an emulator can run it
// for another CPU: "formula type rows digest" a line, formula -1 for silu. Exit status: 0, or how many of those
// that the kernel itself knows were wrong.
#include "../../wasm/expert.h"

#include <stdio.h>

static uint8_t scratch[4 << 20];

static void print(int formula, int type, int rows, const uint8_t *digest) {
    printf("%d %d %d ", formula, type, rows);
    for (int i = 0; i < 32; i++) printf("%02x", digest[i]);
    puts("");
}

int main(void) {
    static const int32_t rows[] = {1, 2, 7};
    uint8_t digest[32];
    int wrong = 0;
    if ((size_t)expert_self_test_scratch_bytes() > sizeof scratch) return 99;
    for (int32_t test = 0; test < expert_num_self_tests(); test++)
        for (int i = 0; i < 3; i++) wrong += expert_self_test(test, rows[i], scratch, sizeof scratch, digest) != 0;
    for (int32_t i = 0; i < expert_num_formats(); i++) {
        const int32_t type = expert_format_type(i);
        for (int32_t formula = -1; expert_known_digest(formula, type, 7, scratch, sizeof scratch, digest) == 0; formula++)
            print(formula, type, 7, digest);
    }
    return wrong;
}

// Runs every known answer of the kernel as a program by itself, so that an emulator can run it for another CPU.
// Exit status: 0, or how many answers were wrong.
#include "../../wasm/expert.h"

static uint8_t scratch[4 << 20];

int main(void) {
    static const int32_t rows[] = {1, 2, 7};
    uint8_t digest[32];
    int wrong = 0;
    if ((size_t)expert_self_test_scratch_bytes() > sizeof scratch) return 99;
    for (int32_t test = 0; test < expert_num_self_tests(); test++)
        for (int i = 0; i < 3; i++) wrong += expert_self_test(test, rows[i], scratch, sizeof scratch, digest) != 0;
    return wrong;
}

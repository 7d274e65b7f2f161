// Eight f32 lanes in a register of 256 bits: what avx2.h and avx512vnni.h share.
INLINE f8 f8_zero(void) { return _mm256_setzero_ps(); }
INLINE f8 f8_load(const void *p) { return _mm256_loadu_ps((const float *)p); }
INLINE f8 f8_of_f16(const void *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
INLINE f8 f8_of_bf16(const void *p) {
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
INLINE f8 f8_mul_add(f8 acc, f8 a, f8 b) { return _mm256_add_ps(acc, _mm256_mul_ps(a, b)); }
INLINE float f8_sum(f8 a) { // ((0+4)+(2+6)) + ((1+5)+(3+7))
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
}

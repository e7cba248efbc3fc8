#include <immintrin.h>
__m256 probe(__m256 a, __m128i half) { return _mm256_fmadd_ps(a, a, _mm256_cvtph_ps(half)); }

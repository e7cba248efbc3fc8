#include <immintrin.h>
__m512i dot(__m512i sum, __m512i a, __m512i b) { return _mm512_dpbusd_epi32(sum, a, _mm512_add_epi8(a, b)); }
__m256 low(__m512 a, __m256 b) { return _mm256_mask_add_ps(_mm512_extractf32x8_ps(a, 1), 7, b, b); }

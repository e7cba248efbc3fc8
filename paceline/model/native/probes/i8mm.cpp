#include <arm_neon.h>
int32x4_t probe(int32x4_t sum, uint8x16_t a, int8x16_t b) { return vusmmlaq_s32(sum, a, b); }

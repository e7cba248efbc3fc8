#include <arm_neon.h>
int32x4_t probe(int32x4_t sum, int8x16_t a, int8x16_t b) { return vdotq_laneq_s32(sum, a, b, 1); }

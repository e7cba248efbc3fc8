#include <arm_neon.h>
uint16_t probe(uint16x8_t a) { return vmaxvq_u16(a); }

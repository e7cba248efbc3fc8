// Packed weights. Rows stand in groups of four, columns in blocks of 32, so that one pass over a group is one stream of memory
// and gives four outputs; what is missing to whole groups and blocks is zero. Wide matrices are cut into panels of columns, one
// behind the other: the inputs of a panel stay in the nearest cache while its groups stream by.
//
// Codes of one group, for each block in turn:
//   PN_F32   4 x 32 floats         PN_BF16  4 x 32 bfloat16        PN_Q8_0  4 x 32 int8
//   PN_Q4_1  32 uint16, one per column: four bits for each of the four rows, row 0 lowest
// then, for the quantised, half-precision scales: PN_Q8_0 four per block, PN_Q4_1 four scales and four minima per block.
#pragma once
#include <cstddef>
#include <cstdint>

#include "api.h"

constexpr int kGroup = 4;
constexpr int kBlock = 32;

constexpr int kPanelBlocks = 24;  // 768 columns: eight rows of inputs take 12 KB

struct PnPanel {
    int32_t first_block = 0, num_blocks = 0;
    size_t codes_bytes = 0;  // of one group
    size_t group_bytes = 0;  // codes and scales
    uint8_t* data = nullptr;

    uint8_t* group(int index) const { return data + size_t(index) * group_bytes; }
};

struct PnMatrix {
    int32_t rows = 0, cols = 0, format = 0;
    int32_t num_groups = 0, num_blocks = 0, num_panels = 0;
    size_t num_bytes = 0;
    PnPanel* panels = nullptr;

    const PnPanel& panel_of(int block) const { return panels[block / kPanelBlocks]; }
    int padded_cols() const { return num_blocks * kBlock; }
    int padded_rows() const { return num_groups * kGroup; }
};

namespace pn {

// Zeros; null when there is no memory. Weights share large pieces in huge pages.
void* allocate(size_t bytes);
void release(void* data);
void* allocate_weights(size_t bytes);
void release_weights(void* data);

inline size_t round_up(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

float half_to_float(uint16_t half);
inline float bfloat_to_float(uint16_t value) {
    union { uint32_t bits; float number; } both = {uint32_t(value) << 16};
    return both.number;
}
inline uint16_t float_to_bfloat(float value) {
    union { float number; uint32_t bits; } both = {value};
    if ((both.bits & 0x7fffffffu) > 0x7f800000u) return uint16_t(both.bits >> 16 | 0x40);  // a NaN stays one
    return uint16_t((both.bits + 0x7fff + (both.bits >> 16 & 1)) >> 16);
}

}  // namespace pn

// Packed weights. Rows stand in groups, columns in blocks of 32, so that one pass over a group is one stream of memory; what is
// missing to whole groups and blocks is zero. Wide matrices are cut into panels of columns, one behind the other: the inputs of a
// panel stay in the nearest cache while its groups stream by.
//
// Dense: groups of four rows; for each block in turn 4 x 32 floats (PN_F32) or bfloat16 (PN_BF16).
// Quantised: groups of sixteen rows, so that a vector of 64 bytes holds four neighbouring columns of every row, row after row.
//   PN_Q8_0  eight vectors for each block; a byte is the code plus 128, which integer products want unsigned
//   PN_Q4_1  four vectors for each block: columns 8i to 8i+3 in the low halves of the bytes of vector i, 8i+4 to 8i+7 in the high
// then half-precision scales: PN_Q8_0 sixteen per block, PN_Q4_1 sixteen scales and sixteen minima.
#pragma once
#include <cstddef>
#include <cstdint>

#include "api.h"

constexpr int kGroup = 4;  // rows of a dense group
constexpr int kWide = 16;  // rows of a quantised group; stacked matrices begin at multiples of it
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
    int32_t group_rows = kGroup;
    int32_t num_groups = 0, num_blocks = 0, num_panels = 0;
    size_t num_bytes = 0;
    PnPanel* panels = nullptr;

    const PnPanel& panel_of(int block) const { return panels[block / kPanelBlocks]; }
    int padded_cols() const { return num_blocks * kBlock; }
    bool is_dense() const { return format == PN_F32 || format == PN_BF16; }
    // Pieces of sixteen rows, and the first group of one; that behind the last piece is num_groups.
    int num_pieces() const { return (rows + kWide - 1) / kWide; }
    int group_of_piece(int piece) const {
        const int group = piece * (kWide / group_rows);
        return group < num_groups ? group : num_groups;
    }
};

namespace pn {

// Zeros; null when there is no memory. Weights share large pieces in huge pages.
void* allocate(size_t bytes);
void release(void* data);
void* allocate_weights(size_t bytes);
void release_weights(void* data);

inline size_t round_up(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

// Where the code of a column of a block stands within a quantised group: the byte, and from which bit on.
inline size_t code_byte(int format, size_t block, size_t slot, int col) {
    const int vector = format == PN_Q8_0 ? col / 4 : col / 8, vectors = format == PN_Q8_0 ? 8 : 4;
    return (block * size_t(vectors) + size_t(vector)) * 64 + slot * 4 + size_t(col % 4);
}
inline int code_shift(int format, int col) { return format == PN_Q4_1 && col / 4 % 2 ? 4 : 0; }

float half_to_float(uint16_t half);
inline float bfloat_to_float(uint16_t value) {
    union {
        uint32_t bits;
        float number;
    } both = {uint32_t(value) << 16};
    return both.number;
}
inline uint16_t float_to_bfloat(float value) {
    union {
        float number;
        uint32_t bits;
    } both = {value};
    if ((both.bits & 0x7fffffffu) > 0x7f800000u) return uint16_t(both.bits >> 16 | 0x40);  // a NaN stays one
    return uint16_t((both.bits + 0x7fff + (both.bits >> 16 & 1)) >> 16);
}

}  // namespace pn

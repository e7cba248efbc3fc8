// Packed weights. A matrix is one part, or several below one another in formats of their own, as fused products have them. Rows of
// a part stand in groups, columns in blocks of 32, so that one pass over a group is one stream of memory; what is missing to whole
// groups and blocks is zero. Wide parts are cut into panels of columns, one behind the other: the inputs of a panel stay in the
// nearest cache while its groups stream by.
//
// Dense: groups of four rows; for each block in turn 4 x 32 floats (PN_F32), bfloat16 (PN_BF16) or halves (PN_F16).
// Quantised: groups of sixteen rows, so that a vector of 64 bytes holds four neighbouring columns of every row, row after row:
// formats.h.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "api.h"
#include "formats.h"

constexpr int kPanelBlocks = 24;  // 768 columns: eight rows of inputs take 12 KB; a whole number of super-blocks

struct PnPanel {
    int32_t first_block = 0, num_blocks = 0;
    size_t codes_bytes = 0;  // of one group
    size_t group_bytes = 0;  // codes and scales
    uint8_t* data = nullptr;

    uint8_t* group(int index) const { return data + size_t(index) * group_bytes; }
};

// Rows that are kept in one format.
struct PnPart {
    int32_t rows = 0, cols = 0, format = 0;
    int32_t first_piece = 0;  // of the matrix
    int32_t group_rows = kGroup;
    int32_t num_groups = 0, num_blocks = 0;
    std::vector<PnPanel> panels = {};

    const PnPanel& panel_of(int block) const { return panels[size_t(block / kPanelBlocks)]; }
    bool is_dense() const { return format == PN_F32 || format == PN_BF16 || format == PN_F16; }
    // Pieces of sixteen rows, and the first group of one; that behind the last piece is num_groups.
    int num_pieces() const { return (rows + kWide - 1) / kWide; }
    int group_of_piece(int piece) const {
        const int group = piece * (kWide / group_rows);
        return group < num_groups ? group : num_groups;
    }
};

struct PnMatrix {
    int32_t rows = 0, cols = 0;
    size_t num_bytes = 0;
    uint8_t* data = nullptr;
    std::vector<PnPart> parts = {};

    int padded_cols() const { return (cols + kBlock - 1) / kBlock * kBlock; }
    int num_pieces() const { return (rows + kWide - 1) / kWide; }
    const PnPart& part_of(int row) const {
        size_t index = parts.size() - 1;
        while (row < parts[index].first_piece * kWide) --index;
        return parts[index];
    }
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

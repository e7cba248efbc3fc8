// How quantised weights are kept. A row's weight is scale * (code - offset), or scale * code + minimum where the format has
// minima: codes of four to eight bits in blocks of 32 columns, with a scale for each block or for each half of it.
//
// Codes of a group of sixteen rows stand block after block, `bits` vectors of 64 bytes each. A byte belongs to row byte / 4 and,
// of four neighbouring columns, to column byte % 4; of the eight such quarters of a block
//   8 bits   vector q holds quarter q
//   else     vector q / 2 holds its low four bits, in the low half of the bytes where q is even
//   5 bits   vector 4 holds the fifth bit of quarter q as bit q
//   6 bits   vector 4 + q / 4 holds the upper two as bits 2 (q % 4) and on
// Behind the codes of all blocks of a panel, for each block: half-precision scales of the sixteen rows, then their minima. Formats
// with super-blocks of 256 columns have eight-bit factors there instead, first those of the scales (sixteen for each half), then of
// the minima, and behind all of them, for each super-block, the half-precision numbers that they multiply: scales, then minima.
#pragma once
#include <cstddef>
#include <cstdint>

#include "api.h"

constexpr int kGroup = 4;  // rows of a dense group
constexpr int kWide = 16;  // rows of a quantised group; stacked matrices begin at multiples of it
constexpr int kBlock = 32;
constexpr int kSuper = 8;  // blocks of a super-block

namespace pn {

struct Form {
    int bits;          // of a stored code
    int offset;        // of formats without minima
    int source_cols;   // of a block in a file
    int source_bytes;  // that it takes there
    bool has_minima = false;
    bool has_super = false;
    int halves = 1;          // scales of a block
    bool has_table = false;  // a code stands for a value of kTable

    constexpr bool is_quantised() const { return bits > 0; }
    constexpr size_t code_bytes() const { return size_t(bits) * 64; }  // of a block
    constexpr size_t scale_bytes() const {
        return size_t(has_super ? halves + has_minima : 2 + 2 * has_minima) * kWide;
    }
    constexpr size_t super_bytes() const {
        return has_super ? size_t(2 + 2 * has_minima) * kWide : 0;
    }  // of a super-block
};

constexpr Form form_of(int format) {
    switch (format) {
        case PN_Q4_0:
            return {4, 8, 32, 18};
        case PN_Q4_1:
            return {4, 0, 32, 20, true};
        case PN_Q5_0:
            return {5, 16, 32, 22};
        case PN_Q5_1:
            return {5, 0, 32, 24, true};
        case PN_Q8_0:
            return {8, 128, 32, 34};
        case PN_Q4_K:
            return {4, 0, 256, 144, true, true};
        case PN_Q5_K:
            return {5, 0, 256, 176, true, true};
        case PN_Q6_K:
            return {6, 32, 256, 210, false, true, 2};
        case PN_IQ4_NL:
            return {4, 128, 32, 18, false, false, 1, true};
        case PN_IQ4_XS:
            return {4, 128, 256, 136, false, true, 1, true};
        default:
            return {0, 0, 1, 0};
    }
}

// What the sixteen codes of IQ4_NL and IQ4_XS stand for, plus 128: integer products want unsigned bytes.
constexpr uint8_t kTable[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};

// The code of one column; `block` is where its codes begin.
inline int code_at(const Form& form, const uint8_t* block, int slot, int col) {
    const int quarter = col / 4, byte = slot * 4 + col % 4;
    if (form.bits == 8) return block[quarter * 64 + byte];
    int code = block[quarter / 2 * 64 + byte] >> quarter % 2 * 4 & 15;
    if (form.bits == 5) code |= (block[4 * 64 + byte] >> quarter & 1) << 4;
    if (form.bits == 6) code |= (block[(4 + quarter / 4) * 64 + byte] >> quarter % 4 * 2 & 3) << 4;
    return form.has_table ? kTable[code] : code;
}

// One row's 32 columns as a file has them.
struct RowBlock {
    uint8_t codes[kBlock];
    uint16_t scale, minimum;  // half precision
    uint8_t factors[3];       // with super-blocks: of the scales, then of the minimum
};

// Block `number` of a row of a file.
RowBlock read_block(int format, const uint8_t* row, int number);
// Its codes to their places in a group: `block` is where those of this block begin.
void put_codes(const Form& form, const RowBlock& from, uint8_t* block, int slot);

}  // namespace pn

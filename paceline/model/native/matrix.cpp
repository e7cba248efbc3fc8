#include "matrix.h"

#include <cstring>
#include <new>

#include "error.h"

namespace pn {

namespace {

constexpr size_t kQ8Bytes = 2 + kBlock;  // ggml's block_q8_0: scale, 32 int8
constexpr size_t kQ4Bytes =
    2 + 2 + kBlock / 2;  // ggml's block_q4_1: scale, minimum, columns 0-15 in low and 16-31 in high nibbles

size_t element_bytes(int format) { return format == PN_F32 ? 4 : 2; }

// Where a block of a row of the matrix stands: its panel's group, and its number there.
struct Place {
    const PnPanel& panel;
    uint8_t* group;
    size_t block;
    size_t slot;  // row within the group

    Place(const PnMatrix& matrix, int row, int number)
        : panel(matrix.panel_of(number)), group(panel.group(row / matrix.group_rows)),
          block(size_t(number - panel.first_block)), slot(size_t(row % matrix.group_rows)) {}
    uint8_t* dense(size_t row_bytes) const { return group + (block * kGroup + slot) * row_bytes; }
    uint8_t* scale() const { return group + panel.codes_bytes + (block * kWide + slot) * 2; }  // of PN_Q8_0
    uint8_t* scale(int part) const {
        return group + panel.codes_bytes + ((block * 2 + size_t(part)) * kWide + slot) * 2;
    }  // of PN_Q4_1
};

void put_code(const Place& place, int format, int col, unsigned code) {
    uint8_t& byte = place.group[code_byte(format, place.block, place.slot, col)];
    const int shift = code_shift(format, col);
    byte = format == PN_Q8_0 ? uint8_t(code) : uint8_t((byte & ~(15u << shift)) | code << shift);
}

unsigned code_at(const Place& place, int format, int col) {
    const unsigned byte = place.group[code_byte(format, place.block, place.slot, col)];
    return format == PN_Q8_0 ? byte : byte >> code_shift(format, col) & 15u;
}

void fill_dense(PnMatrix& matrix, int row, int source, const uint8_t* from) {
    for (int col = 0; col < matrix.cols; ++col) {
        float value;
        uint16_t half;
        if (source == PN_F32) {
            memcpy(&value, from + size_t(col) * 4, 4);
            half = float_to_bfloat(value);
        } else {
            memcpy(&half, from + size_t(col) * 2, 2);
            value = bfloat_to_float(half);
        }
        const size_t bytes = element_bytes(matrix.format);
        uint8_t* to = Place(matrix, row, col / kBlock).dense(kBlock * bytes) + size_t(col % kBlock) * bytes;
        memcpy(to, matrix.format == PN_F32 ? static_cast<const void*>(&value) : &half, bytes);
    }
}

void fill_q8(PnMatrix& matrix, int row, const uint8_t* from) {
    for (int block = 0; block < matrix.num_blocks; ++block, from += kQ8Bytes) {
        const Place place(matrix, row, block);
        memcpy(place.scale(), from, 2);
        for (int col = 0; col < kBlock; ++col) put_code(place, PN_Q8_0, col, from[2 + col] ^ 128u);
    }
}

void fill_q4(PnMatrix& matrix, int row, const uint8_t* from) {
    for (int block = 0; block < matrix.num_blocks; ++block, from += kQ4Bytes) {
        const Place place(matrix, row, block);
        memcpy(place.scale(0), from, 2);
        memcpy(place.scale(1), from + 2, 2);
        for (int col = 0; col < kBlock; ++col)
            put_code(place, PN_Q4_1, col, col < 16 ? from[4 + col] & 15u : unsigned(from[4 + col % 16]) >> 4);
    }
}

// Rows are copied within one format: nothing of a row depends on its neighbours but its place.
void copy_row(const PnMatrix& from, int from_row, PnMatrix& to, int to_row) {
    for (int block = 0; block < from.num_blocks; ++block) {
        const Place source(from, from_row, block), target(to, to_row, block);
        if (from.is_dense()) {
            const size_t bytes = kBlock * element_bytes(from.format);
            memcpy(target.dense(bytes), source.dense(bytes), bytes);
            continue;
        }
        for (int col = 0; col < kBlock; ++col) put_code(target, from.format, col, code_at(source, from.format, col));
        if (from.format == PN_Q8_0) memcpy(target.scale(), source.scale(), 2);
        else
            for (int part = 0; part < 2; ++part) memcpy(target.scale(part), source.scale(part), 2);
    }
}

// Sizes of the panels and memory for all of them, zero; null when there is none.
uint8_t* lay_out(PnMatrix& matrix) {
    const int format = matrix.format;
    const size_t scales = format == PN_Q8_0 ? kWide * 2 : format == PN_Q4_1 ? 2 * kWide * 2 : 0;
    const size_t codes = format == PN_Q4_1   ? kWide * kBlock / 2
                         : format == PN_Q8_0 ? kWide * kBlock
                                             : kGroup * kBlock * element_bytes(format);
    for (int index = 0; index < matrix.num_panels; ++index) {
        PnPanel& panel = matrix.panels[index];
        panel.first_block = index * kPanelBlocks;
        panel.num_blocks =
            matrix.num_blocks - panel.first_block < kPanelBlocks ? matrix.num_blocks - panel.first_block : kPanelBlocks;
        panel.codes_bytes = size_t(panel.num_blocks) * codes;
        panel.group_bytes = round_up(size_t(panel.num_blocks) * (codes + scales), 64);
        matrix.num_bytes += size_t(matrix.num_groups) * panel.group_bytes;
    }
    uint8_t* data = static_cast<uint8_t*>(allocate_weights(matrix.num_bytes));
    if (!data) return nullptr;
    size_t used = 0;
    for (int index = 0; index < matrix.num_panels; ++index) {
        matrix.panels[index].data = data + used;
        used += size_t(matrix.num_groups) * matrix.panels[index].group_bytes;
    }
    return data;
}

}  // namespace

float half_to_float(uint16_t half) {
    const uint32_t sign = uint32_t(half & 0x8000u) << 16, exponent = half >> 10 & 31u, mantissa = half & 1023u;
    if (exponent == 0) {
        const float value = float(mantissa) * 5.9604644775390625e-8f;  // 2^-24
        return sign ? -value : value;
    }
    union {
        uint32_t bits;
        float number;
    } both;
    both.bits = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | mantissa << 13;
    return both.number;
}

}  // namespace pn

using namespace pn;

PnMatrix* pn_matrix_new(int32_t rows, int32_t cols, int32_t format) {
    if (rows < 1 || cols < 1) return fail_null("a matrix needs at least one row and column");
    if (format < PN_F32 || format > PN_Q4_1) return fail_null("unknown matrix format");
    const bool is_dense = format == PN_F32 || format == PN_BF16;
    if (!is_dense && cols % kBlock) return fail_null("quantised rows must be whole blocks of 32");
    PnMatrix* matrix = new (std::nothrow) PnMatrix;
    if (!matrix) return fail_null("out of memory");
    matrix->rows = rows, matrix->cols = cols, matrix->format = format;
    matrix->group_rows = is_dense ? kGroup : kWide;
    matrix->num_groups = (rows + matrix->group_rows - 1) / matrix->group_rows,
    matrix->num_blocks = (cols + kBlock - 1) / kBlock;
    matrix->num_panels = (matrix->num_blocks + kPanelBlocks - 1) / kPanelBlocks;
    matrix->panels = new (std::nothrow) PnPanel[size_t(matrix->num_panels)];
    uint8_t* data = matrix->panels ? lay_out(*matrix) : nullptr;
    if (!data) {
        delete[] matrix->panels;
        delete matrix;
        return fail_null("out of memory");
    }
    return matrix;
}

void pn_matrix_free(PnMatrix* matrix) {
    if (!matrix) return;
    release_weights(matrix->panels[0].data);
    delete[] matrix->panels;
    delete matrix;
}

int64_t pn_matrix_bytes(const PnMatrix* matrix) { return int64_t(matrix->num_bytes); }

int32_t pn_matrix_fill(PnMatrix* matrix, int32_t first_row, int32_t num_rows, int32_t source, const void* data) {
    const bool is_dense = matrix->is_dense() && (source == PN_F32 || source == PN_BF16);
    if (source != matrix->format && !is_dense) return fail("this source does not fit the matrix's format");
    if (num_rows < 1 || first_row < 0 || first_row > matrix->num_groups * matrix->group_rows - num_rows)
        return fail("rows beyond the matrix");
    const size_t blocks = size_t(matrix->num_blocks);
    const size_t row_bytes = source == PN_Q8_0   ? blocks * kQ8Bytes
                             : source == PN_Q4_1 ? blocks * kQ4Bytes
                                                 : size_t(matrix->cols) * element_bytes(source);
    const uint8_t* row = static_cast<const uint8_t*>(data);
    for (int index = 0; index < num_rows; ++index, row += row_bytes) {
        const int at = first_row + index;
        if (source == PN_Q8_0) fill_q8(*matrix, at, row);
        else if (source == PN_Q4_1) fill_q4(*matrix, at, row);
        else fill_dense(*matrix, at, source, row);
    }
    return 0;
}

PnMatrix* pn_matrix_select(const PnMatrix* matrix, const int32_t* ids, int32_t num_ids) {
    for (int index = 0; index < num_ids; ++index)
        if (ids[index] < 0 || ids[index] >= matrix->rows) return fail_null("a selected row is outside the matrix");
    PnMatrix* part = pn_matrix_new(num_ids, matrix->cols, matrix->format);
    if (part)
        for (int index = 0; index < num_ids; ++index) copy_row(*matrix, ids[index], *part, index);
    return part;
}

#include "matrix.h"

#include <cstring>
#include <new>

#include "error.h"

namespace pn {

namespace {

constexpr size_t kQ8Bytes = 2 + kBlock;          // ggml's block_q8_0: scale, 32 int8
constexpr size_t kQ4Bytes = 2 + 2 + kBlock / 2;  // ggml's block_q4_1: scale, minimum, columns 0-15 in low and 16-31 in high nibbles

size_t element_bytes(int format) { return format == PN_F32 ? 4 : 2; }

bool is_dense(int format) { return format == PN_F32 || format == PN_BF16; }

void fill_dense(PnMatrix& matrix, uint8_t* group, int slot, int source, const uint8_t* row) {
    for (int col = 0; col < matrix.cols; ++col) {
        const size_t at = size_t(col / kBlock) * kGroup * kBlock + size_t(slot) * kBlock + size_t(col % kBlock);
        float value;
        uint16_t half;
        if (source == PN_F32) {
            memcpy(&value, row + size_t(col) * 4, 4);
            half = float_to_bfloat(value);
        } else {
            memcpy(&half, row + size_t(col) * 2, 2);
            value = bfloat_to_float(half);
        }
        if (matrix.format == PN_F32) memcpy(group + at * 4, &value, 4);
        else memcpy(group + at * 2, &half, 2);
    }
}

void fill_q8(PnMatrix& matrix, uint8_t* group, int slot, const uint8_t* row) {
    for (int block = 0; block < matrix.num_blocks; ++block, row += kQ8Bytes) {
        memcpy(group + matrix.codes_bytes + (size_t(block) * kGroup + size_t(slot)) * 2, row, 2);
        memcpy(group + (size_t(block) * kGroup + size_t(slot)) * kBlock, row + 2, kBlock);
    }
}

void fill_q4(PnMatrix& matrix, uint8_t* group, int slot, const uint8_t* row) {
    for (int block = 0; block < matrix.num_blocks; ++block, row += kQ4Bytes) {
        uint8_t* scales = group + matrix.codes_bytes + size_t(block) * 2 * kGroup * 2;
        memcpy(scales + slot * 2, row, 2);
        memcpy(scales + (kGroup + slot) * 2, row + 2, 2);
        uint8_t* codes = group + size_t(block) * kBlock * 2;
        for (int col = 0; col < kBlock; ++col) {
            const uint8_t pair = row[4 + col % 16];
            const unsigned code = col < 16 ? pair & 15u : pair >> 4;
            uint16_t word;
            memcpy(&word, codes + col * 2, 2);
            word = uint16_t((word & ~(15u << 4 * slot)) | code << 4 * slot);
            memcpy(codes + col * 2, &word, 2);
        }
    }
}

// Rows are copied within one format: nothing of a row depends on its neighbours but its place.
void copy_row(const PnMatrix& from, int from_row, PnMatrix& to, int to_row) {
    const uint8_t* source = from.group(from_row / kGroup);
    uint8_t* target = to.data + size_t(to_row / kGroup) * to.group_bytes;
    const int a = from_row % kGroup, b = to_row % kGroup;
    for (int block = 0; block < from.num_blocks; ++block) {
        if (from.format == PN_Q4_1) {
            for (int col = 0; col < kBlock; ++col) {
                const size_t at = (size_t(block) * kBlock + size_t(col)) * 2;
                uint16_t given, word;
                memcpy(&given, source + at, 2), memcpy(&word, target + at, 2);
                word = uint16_t((word & ~(15u << 4 * b)) | (unsigned(given) >> 4 * a & 15u) << 4 * b);
                memcpy(target + at, &word, 2);
            }
        } else {
            const size_t bytes = from.codes_bytes / size_t(from.num_blocks) / kGroup;
            memcpy(target + (size_t(block) * kGroup + size_t(b)) * bytes, source + (size_t(block) * kGroup + size_t(a)) * bytes, bytes);
        }
        if (is_dense(from.format)) continue;
        for (int part = 0; part < (from.format == PN_Q4_1 ? 2 : 1); ++part) {
            const size_t base = (size_t(block) * (from.format == PN_Q4_1 ? 2 : 1) + size_t(part)) * kGroup;
            memcpy(target + to.codes_bytes + (base + size_t(b)) * 2, source + from.codes_bytes + (base + size_t(a)) * 2, 2);
        }
    }
}

}  // namespace

float half_to_float(uint16_t half) {
    const uint32_t sign = uint32_t(half & 0x8000u) << 16, exponent = half >> 10 & 31u, mantissa = half & 1023u;
    if (exponent == 0) {
        const float value = float(mantissa) * 5.9604644775390625e-8f;  // 2^-24
        return sign ? -value : value;
    }
    union { uint32_t bits; float number; } both;
    both.bits = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | mantissa << 13;
    return both.number;
}

}  // namespace pn

using namespace pn;

PnMatrix* pn_matrix_new(int32_t rows, int32_t cols, int32_t format) {
    if (rows < 1 || cols < 1) return fail_null("a matrix needs at least one row and column");
    if (format < PN_F32 || format > PN_Q4_1) return fail_null("unknown matrix format");
    if (!is_dense(format) && cols % kBlock) return fail_null("quantised rows must be whole blocks of 32");
    PnMatrix* matrix = new (std::nothrow) PnMatrix;
    if (!matrix) return fail_null("out of memory");
    matrix->rows = rows, matrix->cols = cols, matrix->format = format;
    matrix->num_groups = (rows + kGroup - 1) / kGroup, matrix->num_blocks = (cols + kBlock - 1) / kBlock;
    const size_t blocks = size_t(matrix->num_blocks);
    const size_t scales = format == PN_Q8_0 ? kGroup * 2 : format == PN_Q4_1 ? 2 * kGroup * 2 : 0;
    const size_t codes = format == PN_Q4_1 ? kBlock * 2 : format == PN_Q8_0 ? kGroup * kBlock : kGroup * kBlock * element_bytes(format);
    matrix->codes_bytes = blocks * codes;
    matrix->group_bytes = round_up(blocks * (codes + scales), 64);
    matrix->data = static_cast<uint8_t*>(allocate_weights(size_t(matrix->num_groups) * matrix->group_bytes));
    if (!matrix->data) {
        delete matrix;
        return fail_null("out of memory");
    }
    return matrix;
}

void pn_matrix_free(PnMatrix* matrix) {
    if (!matrix) return;
    release_weights(matrix->data);
    delete matrix;
}

int64_t pn_matrix_bytes(const PnMatrix* matrix) { return int64_t(matrix->num_groups) * int64_t(matrix->group_bytes); }

int32_t pn_matrix_fill(PnMatrix* matrix, int32_t first_group, int32_t num_rows, int32_t source, const void* data) {
    if (source != matrix->format && !(is_dense(matrix->format) && is_dense(source))) return fail("this source does not fit the matrix's format");
    const int last = first_group + (num_rows - 1) / kGroup;
    if (num_rows < 1 || first_group < 0 || last >= matrix->num_groups) return fail("rows beyond the matrix");
    const size_t blocks = size_t(matrix->num_blocks);
    const size_t row_bytes = source == PN_Q8_0   ? blocks * kQ8Bytes
                             : source == PN_Q4_1 ? blocks * kQ4Bytes
                                                 : size_t(matrix->cols) * element_bytes(source);
    const uint8_t* row = static_cast<const uint8_t*>(data);
    for (int index = 0; index < num_rows; ++index, row += row_bytes) {
        uint8_t* group = matrix->data + size_t(first_group + index / kGroup) * matrix->group_bytes;
        if (source == PN_Q8_0) fill_q8(*matrix, group, index % kGroup, row);
        else if (source == PN_Q4_1) fill_q4(*matrix, group, index % kGroup, row);
        else fill_dense(*matrix, group, index % kGroup, source, row);
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

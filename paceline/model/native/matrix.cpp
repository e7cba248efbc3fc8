#include "matrix.h"

#include <cstring>
#include <memory>
#include <new>
#include <utility>

#include "error.h"
#include "model.h"

namespace pn {

namespace {

size_t element_bytes(int format) { return format == PN_F32 ? 4 : 2; }

// Where a block of a row of a part stands: its panel's group, and its number there.
struct Place {
    const PnPanel& panel;
    const Form form;
    uint8_t* group;
    size_t block;
    size_t slot;  // row within the group

    Place(const PnPart& part, int row, int number)
        : panel(part.panel_of(number)), form(form_of(part.format)), group(panel.group(row / part.group_rows)),
          block(size_t(number - panel.first_block)), slot(size_t(row % part.group_rows)) {}
    uint8_t* dense(size_t row_bytes) const { return group + (block * kGroup + slot) * row_bytes; }
    uint8_t* codes() const { return group + block * form.code_bytes(); }
    // The place among numbers of `bytes` each, sixteen of a kind: scales and minima, or factors of eight bits.
    uint8_t* scale(int kind, size_t bytes) const {
        return group + panel.codes_bytes + block * form.scale_bytes() + (size_t(kind) * kWide + slot) * bytes;
    }
    uint8_t* super(int kind) const {
        return group + panel.codes_bytes + size_t(panel.num_blocks) * form.scale_bytes() +
               block / kSuper * form.super_bytes() + (size_t(kind) * kWide + slot) * 2;
    }
};

void fill_dense(const PnPart& part, int row, int source, const uint8_t* from) {
    for (int col = 0; col < part.cols; ++col) {
        float value;
        uint16_t half;
        if (source == PN_F32) {
            memcpy(&value, from + size_t(col) * 4, 4);
            half = float_to_bfloat(value);
        } else {
            memcpy(&half, from + size_t(col) * 2, 2);
            value = source == PN_F16 ? half_to_float(half) : bfloat_to_float(half);
        }
        const size_t bytes = element_bytes(part.format);
        uint8_t* to = Place(part, row, col / kBlock).dense(kBlock * bytes) + size_t(col % kBlock) * bytes;
        memcpy(to, part.format == PN_F32 ? static_cast<const void*>(&value) : &half, bytes);
    }
}

void fill_blocks(const PnPart& part, int row, const uint8_t* from) {
    for (int number = 0; number < part.num_blocks; ++number) {
        const Place place(part, row, number);
        const Form& form = place.form;
        const RowBlock block = read_block(part.format, from, number);
        put_codes(form, block, place.codes(), int(place.slot));
        if (!form.has_super) {
            memcpy(place.scale(0, 2), &block.scale, 2);
            if (form.has_minima) memcpy(place.scale(1, 2), &block.minimum, 2);
            continue;
        }
        for (int kind = 0; kind < form.halves + form.has_minima; ++kind) *place.scale(kind, 1) = block.factors[kind];
        memcpy(place.super(0), &block.scale, 2);
        if (form.has_minima) memcpy(place.super(1), &block.minimum, 2);
    }
}

// Rows of a file into a part, shared out among threads by whole groups: neighbours stand in the same bytes' words.
struct Fill {
    const PnPart& part;
    int first_row, source;
    const uint8_t* data;
    size_t row_bytes;
    Share share;
    int num_rows, num_threads;

    void run(int thread) {
        share.each((num_rows + kWide - 1) / kWide, num_threads, 1, thread, [&](int begin, int end) {
            for (int index = begin * kWide; index < end * kWide && index < num_rows; ++index) {
                const uint8_t* row = data + size_t(index) * row_bytes;
                if (part.is_dense()) fill_dense(part, first_row + index, source, row);
                else fill_blocks(part, first_row + index, row);
            }
        });
    }
};

// Rows are copied within one format: nothing of a row depends on its neighbours but its place.
void copy_row(const PnPart& from, int from_row, const PnPart& to, int to_row) {
    for (int number = 0; number < from.num_blocks; ++number) {
        const Place source(from, from_row, number), target(to, to_row, number);
        if (from.is_dense()) {
            const size_t bytes = kBlock * element_bytes(from.format);
            memcpy(target.dense(bytes), source.dense(bytes), bytes);
            continue;
        }
        const Form& form = source.form;
        for (int vector = 0; vector < form.bits; ++vector)
            memcpy(target.codes() + vector * 64 + target.slot * 4, source.codes() + vector * 64 + source.slot * 4, 4);
        const size_t bytes = form.has_super ? 1 : 2;
        for (int kind = 0; kind < int(form.scale_bytes() / bytes / kWide); ++kind)
            memcpy(target.scale(kind, bytes), source.scale(kind, bytes), bytes);
        for (int kind = 0; kind < int(form.super_bytes() / 2 / kWide); ++kind)
            memcpy(target.super(kind), source.super(kind), 2);
    }
}

// Sizes of a part and its panels; returns its bytes.
size_t lay_out(PnPart& part) {
    part.group_rows = part.is_dense() ? kGroup : kWide;
    part.num_groups = (part.rows + part.group_rows - 1) / part.group_rows;
    part.num_blocks = (part.cols + kBlock - 1) / kBlock;
    const Form form = form_of(part.format);
    const size_t codes = part.is_dense() ? kGroup * kBlock * element_bytes(part.format) : form.code_bytes();
    const size_t scales = part.is_dense() ? 0 : form.scale_bytes();
    size_t bytes = 0;
    for (int first = 0; first < part.num_blocks; first += kPanelBlocks) {
        PnPanel panel;
        panel.first_block = first;
        panel.num_blocks = part.num_blocks - first < kPanelBlocks ? part.num_blocks - first : kPanelBlocks;
        const size_t blocks = size_t(panel.num_blocks);
        panel.codes_bytes = blocks * codes;
        panel.group_bytes = round_up(blocks * (codes + scales) + blocks / kSuper * form.super_bytes(), 64);
        bytes += size_t(part.num_groups) * panel.group_bytes;
        part.panels.push_back(panel);
    }
    return bytes;
}

const char* fault_of(int32_t rows, int32_t cols, int32_t format) {
    if (rows < 1 || cols < 1) return "a matrix needs at least one row and column";
    if (format < PN_F32 || format >= PN_NUM_FORMATS) return "unknown matrix format";
    const Form form = form_of(format);
    if (form.is_quantised() && cols % form.source_cols)
        return form.has_super ? "rows of this format must be whole blocks of 256"
                              : "quantised rows must be whole blocks of 32";
    return nullptr;
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

PnMatrix* pn_matrix_new(int32_t num_parts, const int32_t* rows, const int32_t* formats, int32_t cols) {
    if (num_parts < 1) return fail_null("a matrix needs at least one row and column");
    try {
        std::unique_ptr<PnMatrix> matrix = std::make_unique<PnMatrix>();
        matrix->cols = cols;
        for (int index = 0; index < num_parts; ++index) {
            if (const char* fault = fault_of(rows[index], cols, formats[index])) return fail_null(fault);
            if (index + 1 < num_parts && rows[index] % kWide) return fail_null("parts must be whole groups of 16 rows");
            PnPart part;
            part.rows = rows[index], part.cols = cols, part.format = formats[index];
            part.first_piece = matrix->rows / kWide;
            matrix->num_bytes += lay_out(part);
            matrix->rows += part.rows;
            matrix->parts.push_back(std::move(part));
        }
        matrix->data = static_cast<uint8_t*>(allocate_weights(matrix->num_bytes));
        if (!matrix->data) return fail_null("out of memory");
        uint8_t* data = matrix->data;
        for (PnPart& part : matrix->parts)
            for (PnPanel& panel : part.panels) panel.data = data, data += size_t(part.num_groups) * panel.group_bytes;
        return matrix.release();
    } catch (const std::bad_alloc&) {
        return fail_null("out of memory");
    }
}

void pn_matrix_free(PnMatrix* matrix) {
    if (!matrix) return;
    release_weights(matrix->data);
    delete matrix;
}

int64_t pn_matrix_bytes(const PnMatrix* matrix) { return int64_t(matrix->num_bytes); }

int32_t pn_matrix_fill(PnMatrix* matrix, int32_t first_row, int32_t num_rows, int32_t source, const void* data) {
    if (num_rows < 1 || first_row < 0 || first_row >= matrix->rows) return fail("rows beyond the matrix");
    const PnPart& part = matrix->part_of(first_row);
    const Form form = form_of(source);
    const bool is_dense =
        part.is_dense() && (source == PN_F32 || source == PN_BF16 || source == PN_F16) &&
        (part.format == source || part.format == PN_F32 || (part.format == PN_BF16 && source == PN_F32));
    if (source != part.format && !is_dense) return fail("this source does not fit the matrix's format");
    first_row -= part.first_piece * kWide;
    if (first_row > part.num_groups * part.group_rows - num_rows) return fail("rows beyond the matrix");
    const size_t row_bytes = part.is_dense() ? size_t(part.cols) * element_bytes(source)
                                             : size_t(part.cols / form.source_cols) * size_t(form.source_bytes);
    Fill fill = {part, first_row, source, static_cast<const uint8_t*>(data), row_bytes, {}, num_rows, 1};
    return in_turn([&](Pool& pool) {
        fill.num_threads = pool.size();
        pool.run([](void* self, int thread) { static_cast<Fill*>(self)->run(thread); }, &fill);
        return 0;
    });
}

PnMatrix* pn_matrix_select(const PnMatrix* matrix, const int32_t* ids, int32_t num_ids) {
    if (matrix->parts.size() != 1) return fail_null("rows are selected from a matrix of one format");
    for (int index = 0; index < num_ids; ++index)
        if (ids[index] < 0 || ids[index] >= matrix->rows) return fail_null("a selected row is outside the matrix");
    PnMatrix* selected = pn_matrix_new(1, &num_ids, &matrix->parts[0].format, matrix->cols);
    if (selected)
        for (int index = 0; index < num_ids; ++index) copy_row(matrix->parts[0], ids[index], selected->parts[0], index);
    return selected;
}

// ggml's blocks of quantised weights: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
#include "formats.h"

#include <cstring>

namespace pn {

namespace {

uint16_t half_of(const uint8_t* from) {
    uint16_t half;
    memcpy(&half, from, 2);
    return half;
}

// Columns 0 to 15 in the low halves of sixteen bytes, the others in the high ones.
void read_nibbles(const uint8_t* from, uint8_t* codes) {
    for (int at = 0; at < kBlock / 2; ++at) codes[at] = from[at] & 15, codes[at + kBlock / 2] = uint8_t(from[at] >> 4);
}

void add_fifth_bits(const uint8_t* from, uint8_t* codes) {
    uint32_t bits;
    memcpy(&bits, from, 4);
    for (int col = 0; col < kBlock; ++col) codes[col] |= uint8_t((bits >> col & 1) << 4);
}

// Q4_K and Q5_K: two numbers, twelve bytes with eight factors of six bits for scales and for minima, fifth bits, codes.
void read_k(const uint8_t* from, int sub, bool has_fifth, RowBlock& out) {
    out.scale = half_of(from), out.minimum = half_of(from + 2);
    const uint8_t* factors = from + 4;
    if (sub < 4) {
        out.factors[0] = factors[sub] & 63, out.factors[1] = factors[sub + 4] & 63;
    } else {
        out.factors[0] = uint8_t((factors[sub + 4] & 15) | factors[sub - 4] >> 6 << 4);
        out.factors[1] = uint8_t(factors[sub + 4] >> 4 | factors[sub] >> 6 << 4);
    }
    const uint8_t* fifth = from + 16;
    const uint8_t* codes = from + (has_fifth ? 48 : 16) + sub / 2 * kBlock;
    for (int col = 0; col < kBlock; ++col) {
        out.codes[col] = uint8_t(codes[col] >> sub % 2 * 4 & 15);
        if (has_fifth) out.codes[col] |= uint8_t((fifth[col] >> sub & 1) << 4);
    }
}

// Q6_K: low four bits, upper two, sixteen factors of eight bits, one number.
void read_q6_k(const uint8_t* from, int sub, RowBlock& out) {
    const int half = sub / 4, quarter = sub % 4;  // of 128 columns
    const uint8_t* low = from + half * 64 + quarter % 2 * kBlock;
    const uint8_t* high = from + 128 + half * kBlock;
    for (int col = 0; col < kBlock; ++col)
        out.codes[col] = uint8_t((low[col] >> quarter / 2 * 4 & 15) | (high[col] >> quarter * 2 & 3) << 4);
    memcpy(out.factors, from + 192 + sub * 2, 2);
    out.scale = half_of(from + 208);
}

// IQ4_XS: one number, upper two and low four bits of eight factors, codes.
void read_iq4_xs(const uint8_t* from, int sub, RowBlock& out) {
    out.scale = half_of(from);
    const int factor = (from[4 + sub / 2] >> sub % 2 * 4 & 15) | (half_of(from + 2) >> sub * 2 & 3) << 4;
    out.factors[0] = uint8_t(factor - 32);  // to be read as a signed byte
    read_nibbles(from + 8 + sub * kBlock / 2, out.codes);
}

}  // namespace

RowBlock read_block(int format, const uint8_t* row, int number) {
    const Form form = form_of(format);
    const int in_source = form.source_cols / kBlock, sub = number % in_source;
    const uint8_t* from = row + size_t(number / in_source) * size_t(form.source_bytes);
    RowBlock out = {};
    switch (format) {
        case PN_Q4_K:
            read_k(from, sub, false, out);
            return out;
        case PN_Q5_K:
            read_k(from, sub, true, out);
            return out;
        case PN_Q6_K:
            read_q6_k(from, sub, out);
            return out;
        case PN_IQ4_XS:
            read_iq4_xs(from, sub, out);
            return out;
        default:
            break;
    }
    out.scale = half_of(from);
    from += 2;
    if (form.has_minima) out.minimum = half_of(from), from += 2;
    if (form.bits == 8) {
        // Signed bytes become unsigned ones, with an offset of 128.
        for (int col = 0; col < kBlock; ++col) out.codes[col] = from[col] ^ 128u;
        return out;
    }
    read_nibbles(from + (form.bits == 5 ? 4 : 0), out.codes);
    if (form.bits == 5) add_fifth_bits(from, out.codes);
    return out;
}

void put_codes(const Form& form, const RowBlock& from, uint8_t* block, int slot) {
    uint32_t quarters[8];  // four codes each
    memcpy(quarters, from.codes, sizeof quarters);
    uint32_t vectors[8] = {};
    for (int quarter = 0; quarter < 8; ++quarter) {
        const uint32_t codes = quarters[quarter];
        if (form.bits == 8) {
            vectors[quarter] = codes;
            continue;
        }
        vectors[quarter / 2] |= (codes & 0x0f0f0f0fu) << quarter % 2 * 4;
        if (form.bits == 5) vectors[4] |= (codes >> 4 & 0x01010101u) << quarter;
        if (form.bits == 6) vectors[4 + quarter / 4] |= (codes >> 4 & 0x03030303u) << quarter % 4 * 2;
    }
    for (int vector = 0; vector < form.bits; ++vector) memcpy(block + vector * 64 + slot * 4, &vectors[vector], 4);
}

}  // namespace pn

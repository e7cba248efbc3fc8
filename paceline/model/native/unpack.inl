// Codes of a quantised block as unsigned bytes, four neighbouring columns of each row at a time; scales and minima of its rows. For
// vectors of any width: the including unit has defined kWidth, vf, and
//   vf halves_at(const uint8_t* from)     kWidth numbers of half precision
//   vf factors_at(const uint8_t* from)     kWidth signed bytes
// and defines look_up.

namespace pn {
namespace {

typedef uint8_t Bytes __attribute__((vector_size(kWidth * 4)));
typedef uint16_t Pairs __attribute__((vector_size(kWidth * 4)));

// The values of kTable.
inline Bytes look_up(Bytes codes);

inline Bytes bytes_at(const uint8_t* from) {
    Bytes bytes;
    __builtin_memcpy(&bytes, from, sizeof bytes);
    return bytes;
}
// Bits that cross from one byte into the next must be masked.
template <int By>
inline Bytes shifted_right(Bytes bytes) {
    Pairs pairs;
    __builtin_memcpy(&pairs, &bytes, sizeof pairs);
    if constexpr (By > 0) pairs >>= By;
    if constexpr (By < 0) pairs <<= -By;
    __builtin_memcpy(&bytes, &pairs, sizeof pairs);
    return bytes;
}

// Quarter `Quarter` of the block whose codes begin at `codes`.
template <int Format, int Quarter>
inline Bytes quarter_of(const uint8_t* codes) {
    constexpr Form form = form_of(Format);
    if constexpr (form.bits == 8) return bytes_at(codes + Quarter * 64);
    Bytes out = shifted_right<Quarter % 2 * 4>(bytes_at(codes + Quarter / 2 * 64)) & uint8_t(15);
    if constexpr (form.bits == 5) out |= shifted_right<Quarter - 4>(bytes_at(codes + 4 * 64)) & uint8_t(16);
    if constexpr (form.bits == 6) {
        out |= shifted_right<Quarter % 4 * 2 - 4>(bytes_at(codes + (4 + Quarter / 4) * 64)) & uint8_t(48);
    }
    if constexpr (form.has_table) out = look_up(out);
    return out;
}

// Of kWidth rows, for each scale of a block.
template <int Format>
struct Scales {
    vf scale[form_of(Format).halves], minimum[form_of(Format).halves];
};

// `scales`: behind the codes of the panel, at the first of the rows among sixteen halves; factors are bytes, `row` rows on.
template <int Format>
inline Scales<Format> scales_of(const PnPanel& panel, const uint8_t* scales, int block, int row) {
    constexpr Form form = form_of(Format);
    Scales<Format> out;
    const uint8_t* own = scales + size_t(block) * form.scale_bytes();
    const uint8_t* super =
        scales + size_t(panel.num_blocks) * form.scale_bytes() + size_t(block / kSuper) * form.super_bytes();
    each<form.halves>([&](auto half) {
        if constexpr (form.has_super)
            out.scale[half] = halves_at(super + row * 2) * factors_at(own + half * kWide + row);
        else out.scale[half] = halves_at(own + row * 2);
        if constexpr (form.has_minima && form.has_super)
            out.minimum[half] = -(halves_at(super + kWide * 2 + row * 2) * factors_at(own + form.halves * kWide + row));
        else if constexpr (form.has_minima) out.minimum[half] = halves_at(own + kWide * 2 + row * 2);
        else out.minimum[half] = out.scale[half] * (vf{} - float(form.offset));
    });
    return out;
}

// The floats behind a row's planes: scale, sum, and sums of both halves of each block.
typedef float Number __attribute__((may_alias));
struct RowFloats {
    const Number* scales;
    int num_blocks;
    float scale(int block) const { return scales[block]; }
    // Of the whole block, or of one half.
    template <int Halves>
    float sum(int block, int half) const {
        return Halves == 1 ? scales[num_blocks + block] : scales[2 * (num_blocks + block) + half];
    }
};

}  // namespace
}  // namespace pn

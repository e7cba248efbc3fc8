// Products of quantised groups through matrix tiles: the sums of integers are exact, scales and minima follow in the order of
// wide_tile, so every bit is that of the narrow products. For units with AVX-512.

#include "tiles.h"

namespace pn {
namespace {

// Codes of a panel's group as bytes: for each block eight vectors of four columns of sixteen rows, which are a tile of weights.
template <int Format>
inline void unpack_group(const PnPanel& panel, const uint8_t* group, uint8_t* to) {
    constexpr Form form = form_of(Format);
    for (int block = 0; block < panel.num_blocks; ++block, group += form.code_bytes(), to += 8 * 64) {
        each<8>([&](auto at) { _mm512_storeu_si512(to + at * 64, (__m512i)quarter_of<Format, at>(group)); });
        each<form.bits>([&](auto vector) { ask_for(group + vector * 64 + kAhead); });
    }
}

// Sums of 16 rows of weights with high and with low bytes of inputs.
template <class Tiles, int High, int Low, int Weights>
inline void tile_products(const uint8_t* weights, const uint8_t* inputs, int64_t row_bytes) {
    Tiles::template load<Weights>(weights, 64);
    Tiles::template load<4>(inputs, row_bytes);
    Tiles::template load<5>(inputs + kBlock, row_bytes);
    Tiles::template zero<High>();
    Tiles::template zero<Low>();
    Tiles::template multiply<High, 4, Weights>();
    Tiles::template multiply<Low, 5, Weights>();
}

// `Rows` rows of x, or fewer: those of the sums that are beyond the configured tiles mean nothing. Three things are under way, so
// that nothing waits for what has just been written: the products of one piece, the sums of that before on their way to memory,
// and the scaling of those before that. A piece is what shares a scale.
template <class Tiles, int Rows, int Format>
inline void tiled_rows(const PnPanel& panel, const uint8_t* scales, const uint8_t* bytes, const uint8_t* x, int64_t row_bytes,
                       int num_blocks, float (*sums)[kWide]) {
    constexpr Form form = form_of(Format);
    constexpr int kDepth = kBlock / form.halves;
    const uint8_t* planes = x + panel.first_block * 2 * kBlock;
    const uint8_t* floats = x + num_blocks * 2 * kBlock;
    alignas(64) int32_t stored[2][2][kTileRows][kWide];  // of two pieces: sums of high bytes, of low ones
    const int num_pieces = panel.num_blocks * form.halves;
    __m512 acc[Rows];
    each<Rows>([&](auto row) { acc[row] = _mm512_setzero_ps(); });
    for (int step = 0; step < num_pieces + 2; ++step) {
        if (step < num_pieces) {
            const uint8_t* weights = bytes + size_t(step) * kDepth * 16;
            const uint8_t* inputs = planes + step / form.halves * 2 * kBlock + step % form.halves * kDepth;
            if (step % 2 == 0) tile_products<Tiles, 0, 1, 6>(weights, inputs, row_bytes);
            else tile_products<Tiles, 2, 3, 7>(weights, inputs, row_bytes);
        }
        if (step >= 2) {
            const int piece = step - 2, block = piece / form.halves, half = piece % form.halves;
            const Scales<Format> weight = scales_of<Format>(panel, scales, block, 0);
            const __m512 own_scale = (__m512)weight.scale[half], own_minimum = (__m512)weight.minimum[half];
            each<Rows>([&](auto row) {
                const RowFloats own = {reinterpret_cast<const Number*>(floats + row * row_bytes), num_blocks};
                const int at_block = panel.first_block + block;
                const __m512i high = _mm512_load_si512(stored[piece % 2][0][row]);
                const __m512i low = _mm512_load_si512(stored[piece % 2][1][row]);
                const __m512 exact = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(high, 8), low));
                const __m512 factor = _mm512_set1_ps(own.scale(at_block));
                const __m512 sum = _mm512_set1_ps(own.template sum<form_of(Format).halves>(at_block, half));
                acc[row] = _mm512_fmadd_ps(exact, _mm512_mul_ps(own_scale, factor), acc[row]);
                acc[row] = _mm512_fmadd_ps(own_minimum, sum, acc[row]);
            });
        }
        if (step == 0 || step > num_pieces) continue;
        int32_t (&to)[2][kTileRows][kWide] = stored[(step - 1) % 2];
        if (step % 2 == 1) Tiles::template store<0>(to[0], 64), Tiles::template store<1>(to[1], 64);
        else Tiles::template store<2>(to[0], 64), Tiles::template store<3>(to[1], 64);
    }
    each<Rows>([&](auto row) { _mm512_storeu_ps(sums[row], acc[row]); });
}

// All rows with one group. x has room for kTileRows rows more than there are; tiles are of one size, so that they are configured
// once. `scratch`: 512 bytes for each block of the panel.
template <class Tiles, int Format>
void tiled_group(const Product& product, const PnPanel& panel, const uint8_t* group, uint8_t* scratch, const Output& output) {
    unpack_group<Format>(panel, group, scratch);
    const int num_tiles = (product.num_rows + kTileRows - 1) / kTileRows, size = (product.num_rows + num_tiles - 1) / num_tiles;
    const uint8_t* x = static_cast<const uint8_t*>(product.x);
    for (int row = 0; row < product.num_rows; row += size) {
        float sums[kTileRows][kWide];
        const auto run = [&](auto most) {
            tiled_rows<Tiles, most, Format>(panel, group + panel.codes_bytes, scratch, x + row * product.row_bytes,
                                            product.row_bytes, product.part->num_blocks, sums);
        };
        if (size <= kTileRows / 2) run(std::integral_constant<int, kTileRows / 2>());
        else run(std::integral_constant<int, kTileRows>());
        for (int index = 0; index < size && row + index < product.num_rows; ++index)
            output.write_wide(row + index, sums[index]);
    }
}

// What an instruction set with tiles multiplies by them, from so many rows on.
template <class Tiles>
struct Tiled {
    static inline int least_rows = 1;

    // Configured for all groups of a product with rows of this format.
    static void begin(int format, int num_rows) {
        const int num_tiles = (num_rows + kTileRows - 1) / kTileRows;
        Tiles::configure((num_rows + num_tiles - 1) / num_tiles, kBlock / form_of(format).halves);
    }
    static void end() { Tiles::release(); }
    template <int Format>
    static void group(const Product& product, const PnPanel& panel, const uint8_t* data, void* scratch, const Output& output) {
        tiled_group<Tiles, Format>(product, panel, data, static_cast<uint8_t*>(scratch), output);
    }
};

}  // namespace
}  // namespace pn

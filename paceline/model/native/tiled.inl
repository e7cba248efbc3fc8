// Products of quantised groups through matrix tiles: the sums of integers are exact, scales and minima follow in the order of
// wide_tile, so every bit is that of the narrow products. For units with AVX-512.
//
// Inputs stand in chunks of four, six or eight rows. A chunk is the planes of its first block: the high bytes of one row after the
// other, then their low bytes, which are one tile; then those of the next block; and behind all blocks, for each of them, the
// scales of the rows, their sums, and the sums of their first and of their second halves.

#include "tiles.h"

namespace pn {
namespace {

// Tiles take so many lines of memory of their own that those that are asked for wait in the second cache.
inline void ask_for_l2(const void* at) { asm volatile("prefetcht1 %0" : : "m"(*static_cast<const char*>(at))); }

constexpr int kChunkRows = 8;  // at most: with both planes a whole tile
constexpr int kLeastChunkRows = 4;

// Rows of a chunk of inputs, all of one size.
inline int chunk_rows_of(int num_rows) {
    const int num_chunks = (num_rows + kChunkRows - 1) / kChunkRows, size = (num_rows + num_chunks - 1) / num_chunks;
    return size <= kLeastChunkRows ? kLeastChunkRows : (size + 1) / 2 * 2;
}

// Row `index` of a chunk.
inline void chunk_planes(const void* x, int padded_cols, int chunk_rows, int index, void* chunk) {
    const int num_blocks = padded_cols / kBlock;
    int8_t* bytes = static_cast<int8_t*>(chunk);
    float* floats = reinterpret_cast<float*>(bytes + size_t(num_blocks) * 2 * kBlock * size_t(chunk_rows)) + index;
    write_planes(x, num_blocks,
                 {bytes + index * kBlock, bytes + (chunk_rows + index) * kBlock, 2 * kBlock * chunk_rows, floats,
                  floats + chunk_rows, floats + 2 * chunk_rows, 4 * chunk_rows, 4 * chunk_rows, chunk_rows});
}

// A chunk from the first block of a panel on.
struct Chunk {
    const uint8_t* planes;
    const Number* floats;
};

// `Groups` neighbouring groups times a chunk of `Rows` rows. A piece is what shares a scale: a block, or half of one. Three are
// under way, so that nothing waits for what has just been written: the products of one, the sums of that before on their way to
// memory, and the scaling of those before that. Even and odd pieces have tiles of their own. `bytes`: the codes as bytes, for each
// block of each group eight vectors of four columns of sixteen rows, which are a tile of weights. The first chunk unpacks them,
// two blocks ahead, and asks for what comes behind them in memory.
template <class Tiles, int Groups, int Rows, int Format, bool Unpacks>
struct TiledGroups {
    static constexpr Form form = form_of(Format);
    static constexpr int kHalves = form.halves, kDepth = kBlock / kHalves;
    typedef std::integral_constant<int, 0> Even;
    typedef std::integral_constant<int, 1> Odd;

    const PnPanel& panel;
    const uint8_t* codes;
    uint8_t* bytes;
    Chunk in;

    template <class Side>
    PN_INLINE void multiply(Side side, int piece) const {
        Tiles::template load<4 + side>(in.planes + piece / kHalves * 2 * kBlock * Rows + piece % kHalves * kDepth,
                                       kBlock);
        each<Groups>([&](auto group) PN_INLINE {
            constexpr int kSum = group * 2 + side, kWeight = 6 + (Groups == 1 ? side : group);
            Tiles::template load<kWeight>(
                bytes + (size_t(group * panel.num_blocks) * kBlock + size_t(piece) * kDepth) * kWide, 64);
            Tiles::template zero<kSum>();
            Tiles::template multiply<kSum, 4 + side, kWeight>();
        });
    }

    PN_INLINE void unpack(int piece) const {
        if (!Unpacks || piece % kHalves) return;
        const int block = piece / kHalves;
        each<Groups>([&](auto group) PN_INLINE {
            const uint8_t* from = codes + group * panel.group_bytes + size_t(block) * form.code_bytes();
            uint8_t* to = bytes + size_t(group * panel.num_blocks + block) * 8 * 64;
            each<8>([&](auto at)
                        PN_INLINE { _mm512_storeu_si512(to + at * 64, (__m512i)quarter_of<Format, at>(from)); });
            each<form.bits>([&](auto vector) PN_INLINE { ask_for_l2(from + vector * 64 + Groups * 2 * kAhead); });
        });
    }

    typedef int32_t Stored[kTileRows][kWide];

    PN_INLINE void scale(const Stored* stored, int piece, __m512 (&sums)[Groups][Rows]) const {
        const int block = piece / kHalves, half = piece % kHalves;
        const Number* factors = in.floats + block * 4 * Rows;
        const Number* totals = factors + (kHalves == 1 ? 1 : 2 + half) * Rows;
        each<Groups>([&](auto group) PN_INLINE {
            const uint8_t* scales = codes + group * panel.group_bytes + panel.codes_bytes;
            const Scales<Format> weight = scales_of<Format>(panel, scales, block, 0);
            if (Unpacks) ask_for_l2(scales + size_t(block) * form.scale_bytes() + Groups * 2 * kAhead);
            const __m512 own_scale = (__m512)weight.scale[half], own_minimum = (__m512)weight.minimum[half];
            const Stored& from = stored[group];
            each<Rows>([&](auto row) PN_INLINE {
                const __m512i high = _mm512_load_si512(from[row]), low = _mm512_load_si512(from[Rows + row]);
                const __m512 exact = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(high, 8), low));
                __m512& sum = sums[group][row];
                sum = _mm512_fmadd_ps(exact, _mm512_mul_ps(own_scale, _mm512_set1_ps(factors[row])), sum);
                sum = _mm512_fmadd_ps(own_minimum, _mm512_set1_ps(totals[row]), sum);
            });
        });
    }

    PN_INLINE void run(float (*out)[Rows][kWide]) const {
        alignas(64) Stored stored[2][Groups];
        const auto store = [&](auto side) PN_INLINE {
            each<Groups>([&](auto group)
                             PN_INLINE { Tiles::template store<group * 2 + side>(stored[side][group], 64); });
        };
        const int num_pieces = panel.num_blocks * kHalves;
        __m512 sums[Groups][Rows];
        each<Groups>([&](auto group) PN_INLINE {
            each<Rows>([&](auto row) PN_INLINE { sums[group][row] = _mm512_setzero_ps(); });
        });
        for (int piece = 0; piece < 4 && piece < num_pieces; ++piece) unpack(piece);
        multiply(Even(), 0);
        if (num_pieces > 1) multiply(Odd(), 1);
        store(Even());
        int piece = 2;
        for (; piece + 3 < num_pieces; piece += 2) {  // up to piece + 3 is unpacked
            multiply(Even(), piece), store(Odd()), unpack(piece + 2), scale(stored[0], piece - 2, sums);
            multiply(Odd(), piece + 1), store(Even()), unpack(piece + 3), scale(stored[1], piece - 1, sums);
        }
        for (; piece < num_pieces; ++piece) {
            if (piece + 2 < num_pieces) unpack(piece + 2);
            if (piece % 2 == 0) multiply(Even(), piece), store(Odd()), scale(stored[0], piece - 2, sums);
            else multiply(Odd(), piece), store(Even()), scale(stored[1], piece - 2, sums);
        }
        const int last = (num_pieces - 1) % 2;
        if (num_pieces > 1) {
            if (last) store(Odd());
            else store(Even());
            scale(stored[1 - last], num_pieces - 2, sums);
        }
        scale(stored[last], num_pieces - 1, sums);
        each<Groups>([&](auto group) PN_INLINE {
            each<Rows>([&](auto row) PN_INLINE { _mm512_storeu_ps(out[group][row], sums[group][row]); });
        });
    }
};

// Formats whose scales and minima are worth the same: of unpacked codes nothing else matters.
constexpr int unpacked_as(int format) {
    switch (format) {
        case PN_Q5_1:
            return PN_Q4_1;
        case PN_Q5_K:
            return PN_Q4_K;
        case PN_IQ4_NL:
            return PN_Q8_0;
        default:
            return format;
    }
}

template <class Tiles, int Rows, int Format>
struct TiledRows {
    const Product& product;
    const PnPanel& panel;
    const uint8_t* data;
    uint8_t* scratch;
    const Output& output;

    // `Groups` groups from the `group`th on, rows from `row` on.
    template <int Groups, bool Unpacks>
    void run(int group, int row) const {
        constexpr int kFormat = Unpacks ? Format : unpacked_as(Format);
        const size_t num_blocks = size_t(product.part->num_blocks), first = size_t(panel.first_block);
        const uint8_t* chunk = static_cast<const uint8_t*>(product.x) + row * product.row_bytes;
        const Number* floats = reinterpret_cast<const Number*>(chunk + num_blocks * 2 * kBlock * Rows);
        const Chunk in = {chunk + first * 2 * kBlock * Rows, floats + first * 4 * Rows};
        const int count = product.num_rows - row < Rows ? product.num_rows - row : Rows;
        for (int index = 0; index < Groups; ++index) output.ask_for_rows(row, count, (group + index) * kWide);
        float sums[Groups][Rows][kWide];
        TiledGroups<Tiles, Groups, Rows, kFormat, Unpacks>{panel, data + group * panel.group_bytes,
                                                           scratch + size_t(group * panel.num_blocks) * 8 * 64, in}
            .run(sums);
        for (int index = 0; index < Groups; ++index) {
            Output to = output;
            to.y += (group + index) * kWide, to.column += (group + index) * kWide;
            for (int at = 0; at < count; ++at) to.write_wide(row + at, sums[index][at]);
        }
    }

    void run(int num_groups) const {
        for (int group = 0; group < num_groups; ++group) run<1, true>(group, 0);
        for (int row = Rows; row < product.num_rows; row += Rows) {
            if (num_groups == 2) run<2, false>(0, row);
            else run<1, false>(0, row);
        }
    }
};

// What an instruction set with tiles multiplies by them, from so many rows on.
template <class Tiles>
struct Tiled {
    static constexpr bool is_always = false;
    static inline int least_rows = 1;

    // 0: so many rows are not worth a tile. With two scales a block there is twice as much to scale, and nothing else to do.
    static int chunk_rows(int format, int num_rows) {
        const int least = form_of(format).halves == 2 && least_rows > 1 ? kTileRows : least_rows;
        return num_rows < least ? 0 : chunk_rows_of(num_rows);
    }
    static constexpr auto planes = chunk_planes;

    // Configured for all groups of a product with rows of this format.
    static void begin(int format, int chunk_rows) { Tiles::configure(2 * chunk_rows, kBlock / form_of(format).halves); }
    static void end() { Tiles::release(); }
    // One group, or two side by side where rows share what one costs to begin with; returns how many. `scratch`: 512 bytes for
    // each block of both.
    template <int Format>
    static int groups(const Product& product, const PnPanel& panel, const uint8_t* data, int left, void* scratch,
                      const Output& output) {
        const int count = left > 1 && product.num_rows > 2 * kChunkRows ? 2 : 1;
        const auto run = [&](auto rows) {
            if (product.chunk_rows == rows)
                TiledRows<Tiles, rows, Format>{product, panel, data, static_cast<uint8_t*>(scratch), output}.run(count);
        };
        run(std::integral_constant<int, 4>()), run(std::integral_constant<int, 6>()),
            run(std::integral_constant<int, 8>());
        return count;
    }
};

}  // namespace
}  // namespace pn

// Products of quantised groups over vectors of eight lanes, written once for every way to multiply whole numbers. The including unit,
// kernels.inl before this, has defined kUnpackedRows, rows of a tile, and `vi rounded(vf)`: to the nearest, ties to even, and -32768
// for what is no number. `Dots` has
//   template <int Part> vi weights(Bytes)     what of four columns of eight rows meets part 0 or 1 of the inputs
//   int word(int quarter, int part)     which of a block's sixteen words of inputs that part is
//   vi add(vi sums, vi weights, vi inputs)     the same word of inputs in every lane
//   kShift     by how many bits the sums of part 0 weigh more
//   kPieceBytes     from the inputs of four quarters to those of the next four
//   void put(uint8_t* inputs, int first, Shorts whole)     of a block, columns from `first` on

namespace pn {
namespace {

typedef int16_t Shorts __attribute__((vector_size(16)));
typedef int8_t SmallBytes __attribute__((vector_size(8)));
typedef int32_t Word __attribute__((may_alias));

// Inputs as numbers of sixteen bits, of four columns in the order 0, 2, 1, 3: the even bytes of weights, widened, meet the first two,
// the odd ones the others. The unit defines `vi add_madd(vi sums, vi, vi)`: two products of neighbouring sixteen bits are added to each
// sum.
struct WordDots {
    static constexpr int kShift = 0, kPieceBytes = 32;
    template <int Part>
    static vi weights(Bytes bytes) {
        return Part == 0 ? (vi)bytes & 0x00ff00ff : (vi)((Pairs)bytes >> 8);
    }
    static constexpr int word(int quarter, int part) { return quarter * 2 + part; }
    static vi add(vi sums, vi weights, vi inputs) { return add_madd(sums, weights, inputs); }
    static void put(uint8_t* inputs, int first, Shorts whole) {
        const Shorts ordered = __builtin_shufflevector(whole, whole, 0, 2, 1, 3, 4, 6, 5, 7);
        __builtin_memcpy(inputs + first * 2, &ordered, sizeof ordered);
    }
};

// Inputs as planes, 32 high bytes and 32 low ones, both signed. `Processor` has `vi dot(vi sums, vi weights, vi inputs)`: four
// products of unsigned and signed bytes are added to each sum, exactly.
template <class Processor>
struct ByteDots {
    static constexpr int kShift = 8, kPieceBytes = 16;
    template <int>
    static vi weights(Bytes bytes) {
        return (vi)bytes;
    }
    static constexpr int word(int quarter, int part) { return part * 8 + quarter; }
    static vi add(vi sums, vi weights, vi inputs) { return Processor::dot(sums, weights, inputs); }
    static void put(uint8_t* inputs, int first, Shorts whole) {
        // The sum does not overflow, as kPlaneRange is 128 below the largest number.
        const SmallBytes high = __builtin_convertvector((whole + 128) >> 8, SmallBytes);
        const SmallBytes low = __builtin_convertvector(whole, SmallBytes);
        __builtin_memcpy(inputs + first, &high, sizeof high);
        __builtin_memcpy(inputs + kBlock + first, &low, sizeof low);
    }
};

// A row of bfloat16 in fixed point: kernels.h.
template <class Dots>
void planes_of(const void* x, int padded_cols, void* out) {
    constexpr int kVectors = kBlock / kWidth;
    const bfloat* from = static_cast<const bfloat*>(x);
    const int num_blocks = padded_cols / kBlock;
    uint8_t* inputs = static_cast<uint8_t*>(out);
    float* scales = reinterpret_cast<float*>(inputs + num_blocks * 2 * kBlock);
    for (int block = 0; block < num_blocks; ++block, from += kBlock, inputs += 2 * kBlock) {
        vf values[kVectors];
        vi sizes = {};  // ordered as the numbers are, NaNs behind infinity
        each<kVectors>([&](auto at) PN_INLINE {
            values[at] = widen(from + at * kWidth);
            const vi size = (vi)values[at] & 0x7fffffff;
            sizes = size > sizes ? size : sizes;
        });
        int32_t bits = sizes[0];
        for (int lane = 1; lane < kWidth; ++lane) bits = sizes[lane] > bits ? sizes[lane] : bits;
        float most;  // of NaNs one of them: the scale and all that follows are NaN
        __builtin_memcpy(&most, &bits, sizeof most);
        const bool is_zero = most < kLeastElement;
        const vf inverse = splat(is_zero ? 0.0f : float(kPlaneRange) / most);
        vi sums[2] = {};
        each<kVectors>([&](auto at) PN_INLINE {
            const vi whole = rounded(values[at] * inverse);
            sums[at * 2 / kVectors] += whole;
            Dots::put(inputs, at * kWidth, __builtin_convertvector(whole, Shorts));
        });
        int32_t totals[2] = {};
        for (int lane = 0; lane < kWidth; ++lane) totals[0] += sums[0][lane], totals[1] += sums[1][lane];
        scales[block] = is_zero ? 0.0f : most / float(kPlaneRange);
        scales[num_blocks + block] = scales[block] * float(totals[0] + totals[1]);
        each<2>([&](auto half)
                    PN_INLINE { scales[2 * (num_blocks + block) + half] = scales[block] * float(totals[half]); });
    }
}

// Inputs of some rows with a panel.
struct PanelInputs {
    const uint8_t *words, *floats;  // those of the panel, those of the part
    int64_t row_bytes;
    int num_blocks, first_block;  // of the part

    PanelInputs(const Product& product, const PnPanel& panel, int row)
        : words(static_cast<const uint8_t*>(product.x) + row * product.row_bytes + panel.first_block * 2 * kBlock),
          floats(words + (product.part->num_blocks - panel.first_block) * 2 * kBlock), row_bytes(product.row_bytes),
          num_blocks(product.part->num_blocks), first_block(panel.first_block) {}
};

// Sums over pieces of four quarters, of `Rows` rows of inputs with both halves of a group.
template <class Dots, int Rows>
PN_INLINE inline void whole_sums(const uint8_t* codes, const uint8_t* words, int64_t row_bytes, int num_pieces,
                                 vi (&sums)[Rows][2]) {
    constexpr std::integral_constant<int, 0> high{};
    constexpr std::integral_constant<int, 1> low{};
    const auto add = [&](int piece, auto quarter, auto part) PN_INLINE {
        const uint8_t* at = codes + piece * 4 * 64 + quarter * 64;
        const vi first = Dots::template weights<part>(bytes_at(at)),
                 second = Dots::template weights<part>(bytes_at(at + 32));
        each<Rows>([&](auto row) PN_INLINE {
            const uint8_t* own = words + row * row_bytes + piece * Dots::kPieceBytes;
            const vi x = vi{} + reinterpret_cast<const Word*>(own)[Dots::word(quarter, part)];
            sums[row][0] = Dots::add(sums[row][0], first, x), sums[row][1] = Dots::add(sums[row][1], second, x);
        });
    };
    each<Rows>([&](auto row) PN_INLINE { sums[row][0] = sums[row][1] = vi{}; });
    if constexpr (Dots::kShift == 0) {
        for (int piece = 0; piece < num_pieces; ++piece)
            each<4>([&](auto quarter) PN_INLINE { add(piece, quarter, high), add(piece, quarter, low); });
    } else {
        for (int piece = 0; piece < num_pieces; ++piece)
            each<4>([&](auto quarter) PN_INLINE { add(piece, quarter, high); });
        // At most 32 * 255 * 128 * 256, less than 2^28.
        each<Rows>([&](auto row) PN_INLINE { sums[row][0] <<= Dots::kShift, sums[row][1] <<= Dots::kShift; });
        for (int piece = 0; piece < num_pieces; ++piece)
            each<4>([&](auto quarter) PN_INLINE { add(piece, quarter, low); });
    }
}

// What one scale and minimum make of sums. All instruction sets round these two in this order.
template <int Halves>
PN_INLINE inline vf scaled(vf sum, vi whole, vf scale, vf minimum, const PanelInputs& in, int row, int block,
                           int half) {
    const RowFloats own = {reinterpret_cast<const Number*>(in.floats + row * in.row_bytes), in.num_blocks};
    const int at = in.first_block + block;
    sum = fused(__builtin_convertvector(whole, vf), scale * splat(own.scale(at)), sum);
    return fused(minimum, splat(own.template sum<Halves>(at, half)), sum);
}

// A group unpacked: for each block its codes as bytes, eight quarters of sixteen rows; behind all of them, for each scale of a block,
// sixteen scales and sixteen minima as floats.
constexpr int kUnpackedBytes = 8 * 64;

template <int Format>
void unpack_group(const PnPanel& panel, const uint8_t* group, uint8_t* to) {
    constexpr Form form = form_of(Format);
    constexpr int kHalves = form.halves;
    float* floats = reinterpret_cast<float*>(to + panel.num_blocks * kUnpackedBytes);
    for (int block = 0; block < panel.num_blocks; ++block, to += kUnpackedBytes)
        each<2>([&](auto side) PN_INLINE {
            const uint8_t* codes = group + size_t(block) * form.code_bytes() + side * 32;
            each<8>([&](auto at) PN_INLINE {
                const Bytes bytes = quarter_of<Format, at>(codes);
                __builtin_memcpy(to + at * 64 + side * 32, &bytes, sizeof bytes);
            });
            const Scales<Format> weight = scales_of<Format>(panel, group + panel.codes_bytes, block, side * kWidth);
            each<kHalves>([&](auto half) PN_INLINE {
                float* own = floats + (block * kHalves + half) * 2 * kWide + side * kWidth;
                store(own, weight.scale[half]), store(own + kWide, weight.minimum[half]);
            });
        });
}

// `Rows` rows with an unpacked group. `packed`: what was unpacked; the first tile asks for what comes behind it, so many bytes a
// block.
template <class Dots, int Rows, int Halves>
void unpacked_rows(const PanelInputs& in, const uint8_t* codes, int num_blocks, const uint8_t* packed, int packed_bytes,
                   const Output& output, int first_row) {
    const float* floats = reinterpret_cast<const float*>(codes + num_blocks * kUnpackedBytes);
    vf acc[Rows][2] = {};
    for (int block = 0; block < num_blocks; ++block, codes += kUnpackedBytes, packed += packed_bytes) {
        for (int at = 0; at < packed_bytes; at += 64) ask_for_weights(packed + at);
        each<Halves>([&](auto half) PN_INLINE {
            vi whole[Rows][2];
            whole_sums<Dots, Rows>(codes + half * 256, in.words + block * 2 * kBlock + half * Dots::kPieceBytes,
                                   in.row_bytes, 2 / Halves, whole);
            const float* own = floats + (block * Halves + half) * 2 * kWide;
            each<2>([&](auto side) PN_INLINE {
                const vf scale = load(own + side * kWidth), minimum = load(own + kWide + side * kWidth);
                each<Rows>([&](auto row) PN_INLINE {
                    acc[row][side] =
                        scaled<Halves>(acc[row][side], whole[row][side], scale, minimum, in, row, block, half);
                });
            });
        });
    }
    float sums[kWide];
    for (int row = 0; row < Rows; ++row) {
        __builtin_memcpy(sums, acc[row], sizeof sums);
        output.write_wide(first_row + row, sums);
    }
}

// unpacked_rows of so many rows.
template <class Dots, int Halves, int Rows = kUnpackedRows, class... Arguments>
inline void tile_of(int size, const Arguments&... arguments) {
    if constexpr (Rows > 1) {
        if (size < Rows) return tile_of<Dots, Halves, Rows - 1>(size, arguments...);
    }
    unpacked_rows<Dots, Rows, Halves>(arguments...);
}

template <class Dots, int Halves>
__attribute__((noinline)) void unpacked_group(const Product& product, const PnPanel& panel, const uint8_t* codes,
                                              const uint8_t* packed, const Output& output) {
    const int num_tiles = (product.num_rows + kUnpackedRows - 1) / kUnpackedRows;
    for (int index = 0, row = 0, size; index < num_tiles; ++index, row += size) {
        size = (product.num_rows - row + num_tiles - index - 1) / (num_tiles - index);
        const int packed_bytes = index == 0 ? int(panel.group_bytes) / panel.num_blocks : 0;
        tile_of<Dots, Halves>(size, PanelInputs(product, panel, row), codes, panel.num_blocks, packed, packed_bytes,
                              output, row);
    }
}

// For `multiply`, as tiles: takes any number of rows.
template <class Dots>
struct Wide8 {
    static constexpr bool is_always = true;
    static constexpr int (*chunk_rows)(int, int) = nullptr;
    static constexpr void (*planes)(const void*, int, int, int, void*) = nullptr;
    static void begin(int, int) {}
    static void end() {}
    template <int Format>
    static int groups(const Product& product, const PnPanel& panel, const uint8_t* data, int, void* scratch,
                      const Output& output) {
        uint8_t* codes = static_cast<uint8_t*>(scratch);
        unpack_group<Format>(panel, data, codes);
        unpacked_group<Dots, form_of(Format).halves>(product, panel, codes, data, output);
        return 1;
    }
};

}  // namespace
}  // namespace pn

// AVX-512 with instructions for bfloat16; and with matrix tiles where the compiler knows them.
#include <algorithm>
#include <chrono>
#include <memory>

#include "kernels_avx512.inl"
#include "model.h"
#include "tiled.inl"

namespace pn {

const Kernels* avx512bf16_kernels(int dtype) {
    static const Kernels floats = named("avx512bf16", *avx512_kernels(PN_F32));
    return dtype == PN_F32 ? &floats : table<bfloat>("avx512bf16");
}

#ifdef __AMX_INT8__

namespace {

constexpr int kTurns = 5, kMostTried = 16;
constexpr double kWorth =
    1.5;  // times as fast, out of the nearest cache: what a pass does besides is slower beside tiles

// The fastest of some products with `num_rows` rows, in seconds.
double seconds_of(const Kernels& kernels, const PnMatrix& matrix, void* planes, void* scratch, int num_rows, float* y) {
    const Rows x = rows_of(matrix, kernels, nullptr, 0, num_rows, planes);
    double best = 1.0;
    for (int turn = 0; turn < kTurns; ++turn) {
        const auto began = std::chrono::steady_clock::now();
        multiply_pieces(kernels, matrix, 0, matrix.num_pieces(), x, num_rows,
                        {y, matrix.rows, 0, matrix.rows, false, nullptr}, scratch);
        const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - began;
        best = std::min(best, spent.count());
    }
    return best;
}

// From how many rows on tiles are faster here: what feeds them differs from one processor to the next. Takes a millisecond, once;
// no bit of a result depends on it.
int measured_least_rows() {
    constexpr int kRows = 128, kCols = kPanelBlocks * kBlock;
    const int32_t rows = kRows, format = PN_Q4_1;
    const std::unique_ptr<PnMatrix, void (*)(PnMatrix*)> matrix(pn_matrix_new(1, &rows, &format, kCols),
                                                                pn_matrix_free);
    const std::unique_ptr<void, void (*)(void*)> planes(
        allocate(size_t(plane_bytes(kCols)) * (kMostTried + kSpareRows)), release),
        scratch(allocate(scratch_bytes(kCols)), release),
        y(allocate(size_t(kRows) * kMostTried * sizeof(float)), release);
    if (!matrix || !planes || !scratch || !y) return kMostTried;
    for (int num_rows = 2; num_rows < kMostTried; ++num_rows) {
        const auto seconds = [&](const Kernels* kernels) {
            return seconds_of(*kernels, *matrix, planes.get(), scratch.get(), num_rows, static_cast<float*>(y.get()));
        };
        const double tiled = seconds(table<bfloat, Tiled<ProcessorTiles>>("amx"));
        if (tiled * kWorth < seconds(avx512bf16_kernels(PN_BF16))) return num_rows;
    }
    return kMostTried;
}

}  // namespace

const Kernels* amx_kernels(int dtype) {
    static const Kernels floats = named("amx", *avx512_kernels(PN_F32));
    if (dtype == PN_F32) return &floats;
    static const bool is_measured = [] {
        Tiled<ProcessorTiles>::least_rows = measured_least_rows();
        return true;
    }();
    (void)is_measured;
    return table<bfloat, Tiled<ProcessorTiles>>("amx");
}

#endif

}  // namespace pn

// AVX-512 with instructions for bfloat16; and with matrix tiles where the compiler knows them.
#include <chrono>
#include <memory>

#include "kernels_avx512.inl"
#include "tiled.inl"

namespace pn {

const Kernels* avx512bf16_kernels(int dtype) {
    return dtype == PN_F32 ? table<float>("avx512bf16") : table<bfloat>("avx512bf16");
}

#ifdef __AMX_INT8__

namespace {

// The fastest of some products of a few groups with `num_rows` rows, in seconds.
double seconds_of(void (*multiply)(const Product&, void*), const PnPart& part, const void* x, int num_rows, float* y,
                  void* scratch) {
    const int64_t row_bytes = plane_bytes(part.cols);
    const Product product = {&part, 0, part.num_groups, x, row_bytes, num_rows, y, part.rows, 0, part.rows, false, nullptr};
    double best = 1.0;
    for (int turn = 0; turn < 5; ++turn) {
        const auto began = std::chrono::steady_clock::now();
        multiply(product, scratch);
        const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - began;
        best = spent.count() < best ? spent.count() : best;
    }
    return best;
}

// From how many rows on tiles are faster here: what feeds them differs from one processor to the next. Takes some milliseconds,
// once; no bit of a result depends on it.
int measured_least_rows() {
    constexpr int kRows = 128, kCols = kPanelBlocks * kBlock;
    const int32_t rows = kRows, format = PN_Q4_1;
    const std::unique_ptr<PnMatrix, void (*)(PnMatrix*)> matrix(pn_matrix_new(1, &rows, &format, kCols), pn_matrix_free);
    const size_t x_bytes = size_t(plane_bytes(kCols)) * 2 * kTileRows;
    const std::unique_ptr<void, void (*)(void*)> x(allocate(x_bytes), release),
        scratch(allocate(scratch_bytes(kCols)), release);
    const std::unique_ptr<void, void (*)(void*)> y(allocate(size_t(kRows) * kTileRows * sizeof(float)), release);
    if (!matrix || !x || !scratch || !y) return kTileRows;
    const PnPart& part = matrix->parts[0];
    int least = kTileRows;
    for (int num_rows = kTileRows; num_rows > 1; --num_rows) {
        float* out = static_cast<float*>(y.get());
        const double narrow = seconds_of(multiply<bfloat>, part, x.get(), num_rows, out, scratch.get());
        if (seconds_of(multiply<bfloat, Tiled<ProcessorTiles>>, part, x.get(), num_rows, out, scratch.get()) > narrow) break;
        least = num_rows;
    }
    return least;
}

}  // namespace

const Kernels* amx_kernels(int dtype) {
    if (dtype == PN_F32) return table<float>("amx");
    static const bool is_measured = [] {
        Tiled<ProcessorTiles>::least_rows = measured_least_rows();
        return true;
    }();
    (void)is_measured;
    return table<bfloat, Tiled<ProcessorTiles>>("amx");
}

#endif

}  // namespace pn

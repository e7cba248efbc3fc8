// Matrix tiles (Intel AMX) behind one interface, and the same in plain C++: layout, order and bits can be tested on any processor.
//
//   Tiles::configure(rows, depth)     sums 0 to 3 are rows x 16 numbers, inputs 4 and 5 rows x depth bytes, weights 6 and 7 depth x 16
//   Tiles::load<T>(from, stride)     what tile T has room for; rows of memory are `stride` bytes apart
//   Tiles::zero<T>(), multiply<Sum, A, B>(), store<T>(to, stride), release()
//
// multiply: Sum[i][j] += A[i] . B[.][j] in 32-bit integers, A of signed bytes, B of unsigned ones, four neighbours of a column
// together: row k of B holds the bytes 4k to 4k + 3 of column 0, then of column 1, ...
#pragma once
#include <cstdint>
#include <cstring>

namespace pn {
namespace {

constexpr int kTileRows = 16;

// The shape of every tile, in the processor's format: Intel's manual, volume 1, chapter 18.
struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};

    TileShapes(int num_rows, int depth) {
        for (int tile = 0; tile < 8; ++tile) {
            row_bytes[tile] = uint16_t(tile == 4 || tile == 5 ? depth : 64);
            rows[tile] = uint8_t(tile < 6 ? num_rows : depth / 4);
        }
    }
};

struct EmulatedTiles {
    struct State {
        TileShapes shapes{0, 0};
        uint8_t bytes[8][kTileRows][64];
    };
    static State& state() {
        static thread_local State own;
        return own;
    }
    static void configure(int num_rows, int depth) { state().shapes = TileShapes(num_rows, depth); }
    static void release() {}
    template <int Tile>
    static void load(const void* from, int64_t stride) {
        for (int row = 0; row < state().shapes.rows[Tile]; ++row)
            memcpy(state().bytes[Tile][row], static_cast<const uint8_t*>(from) + row * stride,
                   state().shapes.row_bytes[Tile]);
    }
    template <int Tile>
    static void store(void* to, int64_t stride) {
        for (int row = 0; row < state().shapes.rows[Tile]; ++row)
            memcpy(static_cast<uint8_t*>(to) + row * stride, state().bytes[Tile][row], state().shapes.row_bytes[Tile]);
    }
    template <int Tile>
    static void zero() {
        memset(state().bytes[Tile], 0, sizeof state().bytes[Tile]);
    }
    template <int Sum, int A, int B>
    static void multiply() {
        State& own = state();
        uint8_t weights[16]
                       [64];  // copies: sanitized builds look up where the thread's own memory is at every access to it
        memcpy(weights, own.bytes[B], sizeof weights);
        const int num_rows = own.shapes.rows[Sum], num_words = own.shapes.row_bytes[A] / 4;
        for (int row = 0; row < num_rows; ++row) {
            int32_t sums[16];
            int8_t inputs[64];
            memcpy(sums, own.bytes[Sum][row], sizeof sums), memcpy(inputs, own.bytes[A][row], sizeof inputs);
            for (int word = 0; word < num_words; ++word) {
                const int8_t* in = inputs + word * 4;
                for (int column = 0; column < 16; ++column) {
                    const uint8_t* own_weights = weights[word] + column * 4;
                    sums[column] += in[0] * own_weights[0] + in[1] * own_weights[1] + in[2] * own_weights[2] +
                                    in[3] * own_weights[3];
                }
            }
            memcpy(own.bytes[Sum][row], sums, sizeof sums);
        }
    }
};

#ifdef __AMX_INT8__
struct ProcessorTiles {
    static void configure(int num_rows, int depth) {
        const TileShapes shapes(num_rows, depth);
        asm volatile("ldtilecfg %0" : : "m"(shapes));
    }
    static void release() { asm volatile("tilerelease"); }
    template <int Tile>
    static void load(const void* from, int64_t stride) {
        asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(Tile) : "memory");
    }
    template <int Tile>
    static void store(void* to, int64_t stride) {
        asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(Tile) : "memory");
    }
    template <int Tile>
    static void zero() {
        asm volatile("tilezero %%tmm%c0" : : "i"(Tile));
    }
    template <int Sum, int A, int B>
    static void multiply() {
        asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(Sum), "i"(A), "i"(B));
    }
};
#endif

}  // namespace
}  // namespace pn

// A tile of attention with AMX, the matrix unit of Intel CPUs: bf16 factors, fp32 sums.
//
// An element of a product is one sum in ascending order, whatever the other rows are.  A softmax weight enters
// as two bf16 numbers, its upper bits and what is left, so that hardly more is lost than in fp32.
#pragma once

#include <unistd.h>

#include "native_tile.h"

// Whether this process may use AMX.  Linux wants to be asked, once per process (ARCH_REQ_XCOMP_PERM, 18).
static bool amx_allowed() {
#if defined(__AMX_BF16__) && defined(__linux__)
    static const bool allowed = syscall(158 /* arch_prctl */, 0x1023, 18) == 0;
    return allowed;
#else
    return false;
#endif
}

#if defined(__AMX_BF16__)

constexpr int TILE_ROWS = 16;  // of an AMX tile

// The tile registers of a thread, rows[i] rows of 64 bytes each: 0-3 are for sums, 4-5 left, 6-7 right factors.
static void configure_tiles(const long rows[8]) {
    struct alignas(64) {
        uint8_t palette = 1, start = 0, reserved[14] = {};
        uint16_t bytes[16] = {};
        uint8_t rows[16] = {};
    } config;
    for (int i = 0; i < 8; i++)
        if (rows[i]) config.rows[i] = rows[i], config.bytes[i] = 64;
    asm volatile("" : : "r"(&config) : "memory");  // the compiler takes it for reading 8 bytes only
    _tile_loadconfig(&config);
}

struct AmxTile {
    static constexpr int STRIPE = TILE_ROWS;

    alignas(64) uint32_t keys[MAX_DIM / 2 * TILE];    // [pair of dimensions][position]
    alignas(64) uint32_t values[TILE / 2 * MAX_DIM];  // [pair of positions, 16 apart][width]
    alignas(64) bf16 query[MAX_QUERIES * MAX_DIM];    // [count][steps of 32 dimensions]
    alignas(64) float scores[2][STRIPE * TILE];
    alignas(64) bf16 weights[2][STRIPE * TILE];  // upper bits, and what is left

    AmxTile() {
        const long rows[8] = {16, 16, 16, 16, 16, 16, 16, 16};
        configure_tiles(rows);
    }
    ~AmxTile() { _tile_release(); }

    static int steps(int dim) { return (dim + 31) / 32; }

    void load_query(int i, const bf16* from, int dim) {
        bf16* to = query + i * steps(dim) * 32;
        memcpy(to, from, dim * sizeof(bf16));
        memset(to + dim, 0, (steps(dim) * 32 - dim) * sizeof(bf16));
    }

    void unpack(const bf16* const* key, const bf16* const* value, int count, int key_dim, int value_dim, int width,
                Ahead& ahead) {
        const int groups = (count + LANES - 1) / LANES;
        for (int g = 0; g < groups; g++) {
            for (int d = 0; d < key_dim; d += 8) {
                ahead.ask(4);
                u32v column[4];
                transpose(key + g * LANES, d, column);
                for (int i = 0; i < 4; i++) _mm512_store_si512(keys + (d / 2 + i) * TILE + g * LANES, (__m512i)column[i]);
            }
        }
        memset(keys + key_dim / 2 * TILE, 0, (steps(key_dim) * 32 - key_dim) / 2 * TILE * sizeof(uint32_t));
        auto at = [&](int j) { return j < count ? value[j] : nullptr; };  // those behind the last weigh nothing
        for (int i = 0; i < (count + 31) / 32 * 16; i++) {
            const int j = i / 16 * 32 + i % 16;
            ahead.ask(4);
            for (int d = 0; d < width; d += LANES)
                _mm512_store_si512(values + i * width + d, pairs(at(j), at(j + 16), d, value_dim));
        }
    }

    // Elements d to d + 16 of two rows, side by side; a null row and what lies behind a row are zero.
    static __m512i pairs(const bf16* even, const bf16* odd, int d, int dim) {
        const __mmask16 mask = dim - d >= 16 ? 0xffff : (1 << (dim - d)) - 1;
        auto widened = [&](const bf16* row) {
            return row ? _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, row + d)) : _mm512_setzero_si512();
        };
        return _mm512_or_si512(widened(even), _mm512_slli_epi32(widened(odd), 16));
    }

    // Begin with a stripe: its scores, into one of two places.  While the matrix unit is busy with one stripe, the
    // vector units weigh the one before.
    void start(const Stripe<STRIPE>& stripe, int place, int count, int dim) {
        multiply_keys(query + stripe.first * steps(dim) * 32, steps(dim), (count + LANES - 1) / LANES, scores[place]);
    }

    // Take the tile into the state of the stripe's queries.  Rows behind the last are computed and mean nothing.
    void finish(Stripe<STRIPE>& stripe, int place, int count, int, int width, float scale, float softcap,
                const State& state) {
        const int groups = (count + LANES - 1) / LANES, i = stripe.first;
        alignas(64) float decay[STRIPE];
        stripe.count > 8   ? weigh<16>(stripe, scores[place], groups, scale, softcap, state, decay)
        : stripe.count > 4 ? weigh<8>(stripe, scores[place], groups, scale, softcap, state, decay)
                           : weigh<4>(stripe, scores[place], groups, scale, softcap, state, decay);
        for (int q = 0; q < stripe.count; q++) {
            float* acc = state.acc + (i + q) * width;
            if (decay[q] == 1) continue;
            for (int d = 0; d < width; d += LANES) store(acc + d, load(acc + d) * splat(decay[q]));
        }
        add_values(state.acc + i * width, (count + 31) / 32, width);
    }

    // The weights of a stripe's first N queries.  Those behind its last are computed and mean nothing.
    template <int N>
    void weigh(Stripe<STRIPE>& stripe, float* scores, int groups, float scale, float softcap, const State& state,
               float* decay) {
        for (int q = stripe.count; q < N && !stripe.whole; q++) stripe.visible[q] = {0, 0};
        const int i = stripe.first;
        softmax_tile<N>(scores, stripe.whole ? nullptr : stripe.visible, groups, scale, softcap, state.best + i,
                        state.total + i * LANES, decay,
                        [&](int q, int g, f32v a, f32v b) { split(q * TILE + g * LANES, a, b); });
    }

    // scores[q][j] = query[q] . key[j]
    void multiply_keys(const bf16* from, int steps, int groups, float* scores) {
        const long stride = steps * 64;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        asm volatile("" ::: "memory");  // the compiler does not know that tile loads read memory
        for (int k = 0; k < steps; k++) {
            const uint32_t* key = keys + k * 16 * TILE;
            _tile_loadd(4, from + k * 32, stride);
            _tile_loadd(6, key, TILE * 4);
            _tile_dpbf16ps(0, 4, 6);
            if (groups > 1) { _tile_loadd(7, key + 16, TILE * 4); _tile_dpbf16ps(1, 4, 7); }
            if (groups > 2) { _tile_loadd(6, key + 32, TILE * 4); _tile_dpbf16ps(2, 4, 6); }
            if (groups > 3) { _tile_loadd(7, key + 48, TILE * 4); _tile_dpbf16ps(3, 4, 7); }
        }
        _tile_stored(0, scores, TILE * 4);
        _tile_stored(1, scores + 16, TILE * 4);
        _tile_stored(2, scores + 32, TILE * 4);
        _tile_stored(3, scores + 48, TILE * 4);
        asm volatile("" ::: "memory");
    }

    // Two groups of weights as bf16, those of a and b in turns: their upper bits, and what is left.
    void split(int at, f32v a, f32v b) {
        const __m512i upper = _mm512_set1_epi32(0xffff0000);
        auto rest = [&](f32v x) { return (__m512i)_mm512_sub_ps((__m512)x, (__m512)_mm512_and_si512((__m512i)x, upper)); };
        auto pairs = [](__m512i x, __m512i y) { return _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(x, 16), y); };
        _mm512_store_si512(weights[0] + at, pairs((__m512i)a, (__m512i)b));
        _mm512_store_si512(weights[1] + at, pairs(rest(a), rest(b)));
    }

    // acc[q] += sum over j of weights[q][j] * values[j]; steps of 32 positions
    void add_values(float* acc, int steps, int width) {
        asm volatile("" ::: "memory");
        int d = 0;
        for (; d + 64 <= width; d += 64) add_columns<4>(acc + d, values + d, steps, width);
        for (; d < width; d += 16) add_columns<1>(acc + d, values + d, steps, width);
        asm volatile("" ::: "memory");
    }

    template <int COLUMNS>  // of 16 dimensions
    void add_columns(float* acc, const uint32_t* value, int steps, int width) {
        const int stride = width * 4;
        _tile_loadd(0, acc, stride);
        if (COLUMNS == 4) {
            _tile_loadd(1, acc + 16, stride);
            _tile_loadd(2, acc + 32, stride);
            _tile_loadd(3, acc + 48, stride);
        }
        for (int k = 0; k < steps; k++, value += 16 * width) {
            _tile_loadd(4, weights[0] + k * 32, TILE * 2);
            _tile_loadd(5, weights[1] + k * 32, TILE * 2);
            _tile_loadd(6, value, stride);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(0, 5, 6);
            if (COLUMNS == 1) continue;
            _tile_loadd(7, value + 16, stride);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(1, 5, 7);
            _tile_loadd(6, value + 32, stride);
            _tile_dpbf16ps(2, 4, 6);
            _tile_dpbf16ps(2, 5, 6);
            _tile_loadd(7, value + 48, stride);
            _tile_dpbf16ps(3, 4, 7);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, acc, stride);
        if (COLUMNS == 4) {
            _tile_stored(1, acc + 16, stride);
            _tile_stored(2, acc + 32, stride);
            _tile_stored(3, acc + 48, stride);
        }
    }
};
#endif

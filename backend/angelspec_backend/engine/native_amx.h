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
    alignas(64) uint32_t values[TILE / 2 * MAX_DIM];  // [pair of positions][width]
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
        for (int j = 0; j < (count + 31) / 32 * 32; j += 2) {  // positions behind the last weigh nothing, but must be finite
            const bf16* even = j < count ? value[j] : nullptr;
            ahead.ask(4);
            const bf16* odd = j + 1 < count ? value[j + 1] : nullptr;
            for (int d = 0; d < width; d += LANES)
                _mm512_store_si512(values + j / 2 * width + d, pairs(even, odd, d, value_dim));
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
        if (!stripe.whole)
            for (int q = stripe.count; q % 4; q++) stripe.visible[q] = {0, 0};
        alignas(64) float decay[STRIPE];
        for (int q = 0; q < STRIPE; q++) decay[q] = 1;
        for (int q = 0; q < stripe.count; q += 4)
            softmax_tile<4>(scores[place] + q * TILE, stripe.whole ? nullptr : stripe.visible + q, groups, scale, softcap,
                            state.best + i + q, state.total + (i + q) * LANES, decay + q,
                            [&](int r, int g, f32v a, f32v b) { split((q + r) * TILE + g * LANES, a, b); });
        if (_mm512_cmpneq_ps_mask(_mm512_load_ps(decay), _mm512_set1_ps(1)))
            for (int q = 0; q < stripe.count; q++) {
                float* acc = state.acc + (i + q) * width;
                for (int d = 0; d < width; d += LANES) store(acc + d, load(acc + d) * splat(decay[q]));
            }
        add_values(state.acc + i * width, (count + 31) / 32, width);
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

    // Two groups of weights as bf16: their upper bits, and what is left.
    void split(int at, f32v a, f32v b) {
        const __m512i upper = _mm512_set1_epi32(0xffff0000);
        __m512 high_a = (__m512)_mm512_and_si512((__m512i)a, upper), high_b = (__m512)_mm512_and_si512((__m512i)b, upper);
        __m512 low_a = _mm512_sub_ps((__m512)a, high_a), low_b = _mm512_sub_ps((__m512)b, high_b);
        _mm512_store_si512(weights[0] + at, (__m512i)_mm512_cvtne2ps_pbh(high_b, high_a));
        _mm512_store_si512(weights[1] + at, (__m512i)_mm512_cvtne2ps_pbh(low_b, low_a));
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

// One register of floats, on any CPU: 16 lanes of AVX-512, 8 of AVX2, 4 elsewhere.
//
// Everything that could round differently between two builds of the same loop is explicit here:
// the code is compiled without contraction, and a fused multiply-add is written as fma().
#pragma once

#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

struct bf16 {
    uint16_t bits;
};

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif
typedef float f32v __attribute__((vector_size(4 * LANES)));
typedef int32_t i32v __attribute__((vector_size(4 * LANES)));
typedef uint32_t u32v __attribute__((vector_size(4 * LANES)));
typedef uint16_t u16v __attribute__((vector_size(2 * LANES)));
typedef double f64v __attribute__((vector_size(4 * LANES)));  // half as many
typedef int64_t i64v __attribute__((vector_size(4 * LANES)));

static inline f32v splat(float x) { return x - f32v{}; }

static inline i32v lane_numbers() {
    i32v v;
    for (int i = 0; i < LANES; i++) v[i] = i;
    return v;
}

static inline f32v fma(f32v a, f32v b, f32v c) {
#if defined(__AVX512F__)
    return (f32v)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__) && defined(__AVX2__)
    return (f32v)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

static inline f32v max(f32v a, f32v b) { return a > b ? a : b; }
static inline f32v min(f32v a, f32v b) { return a < b ? a : b; }  // b for NaN
static inline f32v where(i32v mask, f32v a, f32v b) { return mask ? a : b; }

// One bit per lane.
static inline uint32_t bits(i32v mask) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask);
#else
    uint32_t all = 0;
    for (int i = 0; i < LANES; i++) all |= (uint32_t)(mask[i] & 1) << i;
    return all;
#endif
}

// Sum and maximum over the lanes, in a fixed tree order.
static inline float sum_lanes(f32v v) {
#if defined(__AVX512F__)
    __m512 a = (__m512)v;
    __m256 b = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    __m128 c = _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
    c = _mm_add_ps(c, _mm_movehl_ps(c, c));
    return _mm_cvtss_f32(_mm_add_ss(c, _mm_movehdup_ps(c)));
#endif
    float x[LANES];
    memcpy(x, &v, sizeof x);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) x[i] += x[i + width];
    return x[0];
}

// Lane q of the result is the maximum over the lanes of v[q], 0 <= q < N; the others mean nothing.
template <int N>
static inline f32v max_lanes(const f32v* v) {
#if defined(__AVX512F__)
    if (N % 4 == 0) {
        __m512 all = _mm512_setzero_ps();
        for (int q = 0; q < N; q += 4) {  // one tree for four: in the end every 128 bits hold maxima of each
            __m512 a = (__m512)v[q], b = (__m512)v[q + 1], c = (__m512)v[q + 2], d = (__m512)v[q + 3];
            __m512d ab = (__m512d)_mm512_max_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
            __m512d cd = (__m512d)_mm512_max_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
            __m512 four = _mm512_max_ps((__m512)_mm512_unpacklo_pd(ab, cd), (__m512)_mm512_unpackhi_pd(ab, cd));
            four = _mm512_max_ps(four, _mm512_shuffle_f32x4(four, four, 0x4e));
            four = _mm512_max_ps(four, _mm512_shuffle_f32x4(four, four, 0xb1));
            all = _mm512_mask_mov_ps(all, 0xf << q, four);
        }
        return (f32v)all;
    }
#endif
    f32v tops = {};
    for (int q = 0; q < N; q++) {
        tops[q] = v[q][0];
        for (int i = 1; i < LANES; i++) tops[q] = v[q][i] > tops[q] ? v[q][i] : tops[q];
    }
    return tops;
}

// 2^x within 3 ulp for x <= 127, exactly 1 for 0; 0 for very negative x.
static inline f32v exp2(f32v x) {
#if defined(__AVX512F__)
    f32v r = (f32v)_mm512_reduce_ps((__m512)x, 1);  // x - floor(x)
#else
    const f32v magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer in the low bits
    i32v tiny = x < splat(-126.0f);
    x = where(tiny, splat(-126.0f), x);
    f32v shifted = x - splat(0.5f) + magic;
    f32v r = x - (shifted - magic);
#endif
    f32v p = fma(r, splat(1.86713e-3f), splat(9.01703e-3f));  // minimax over 0 <= r <= 1, given p(0) = 1
    p = fma(p, r, splat(5.579991e-2f));
    p = fma(p, r, splat(2.4016445e-1f));
    p = fma(p, r, splat(6.9315131e-1f));
    p = fma(p, r, splat(1.0f));
#if defined(__AVX512F__)
    return (f32v)_mm512_scalef_ps((__m512)p, (__m512)x);  // p * 2^floor(x)
#else
    i32v exponent = ((i32v)shifted - (i32v)magic) << 23;
    return where(tiny, f32v{}, (f32v)((i32v)p + exponent));
#endif
}

// exp(x), off by a few ulp times |x|; x is clamped to 88.7 above.
static inline f32v exp(f32v x) { return exp2(min(splat(127.9999f), x * splat(1.44269504f))); }

// 1 / x within 2 ulp, for finite x that are not subnormal.
static inline f32v reciprocal(f32v x) {
#if defined(__AVX512F__)
    f32v r = (f32v)_mm512_rcp14_ps((__m512)x);
    return fma(fma(-x, r, splat(1.0f)), r, r);  // a step of Newton's method
#else
    return splat(1.0f) / x;
#endif
}

// Loads widen to float; stores of bf16 round to nearest even and keep NaN.  Subnormal numbers may become zero.
static inline f32v load(const float* p) {
    f32v v;
    memcpy(&v, p, sizeof v);
    return v;
}

// v rounded to bf16.
static inline u16v narrow(f32v v) {
#if defined(__AVX512BF16__)
    return (u16v)_mm512_cvtneps_pbh((__m512)v);
#else
    u32v bits = (u32v)v;
    u32v rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
    rounded = v == v ? rounded : (bits | 0x400000u);
#if defined(__AVX512F__)
    return (u16v)_mm512_cvtepi32_epi16((__m512i)(rounded >> 16));
#else
    return __builtin_convertvector(rounded >> 16, u16v);
#endif
#endif
}

static inline f32v widen(u16v v) {
#if defined(__AVX512F__)
    return (f32v)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)v), 16);
#else
    return (f32v)(__builtin_convertvector(v, u32v) << 16);
#endif
}

static inline f32v load(const bf16* p) {
    u16v v;
    memcpy(&v, p, sizeof v);
    return widen(v);
}

static inline void store(float* p, f32v v) { memcpy(p, &v, sizeof v); }

static inline void store(bf16* p, f32v v) {
    u16v bits = narrow(v);
    memcpy(p, &bits, sizeof bits);
}

// The value a float takes when it goes through T and back.
template <class T>
static inline f32v round_to(f32v v);
template <>
inline f32v round_to<float>(f32v v) { return v; }
template <>
inline f32v round_to<bf16>(f32v v) { return widen(narrow(v)); }

// The same for the first n lanes; the others read as 0 and are not written.
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
static inline __mmask16 first_lanes(long n) { return n >= LANES ? 0xffff : (1 << n) - 1; }
static inline f32v load(const float* p, long n) { return (f32v)_mm512_maskz_loadu_ps(first_lanes(n), p); }
static inline f32v load(const bf16* p, long n) { return widen((u16v)_mm256_maskz_loadu_epi16(first_lanes(n), p)); }
static inline void store(float* p, f32v v, long n) { _mm512_mask_storeu_ps(p, first_lanes(n), (__m512)v); }
static inline void store(bf16* p, f32v v, long n) { _mm256_mask_storeu_epi16(p, first_lanes(n), (__m256i)narrow(v)); }
#else
template <class T>
static inline f32v load(const T* p, long n) {
    if (n >= LANES) return load(p);
    T part[LANES] = {};
    memcpy(part, p, n * sizeof(T));
    return load(part);
}

template <class T>
static inline void store(T* p, f32v v, long n) {
    if (n >= LANES) return store(p, v);
    T part[LANES];
    store(part, v);
    memcpy(p, part, n * sizeof(T));
}
#endif

// Doubles, where a float's rounding would decide something.
static inline f64v load(const double* p) {
    f64v v;
    memcpy(&v, p, sizeof v);
    return v;
}
static inline void store(double* p, f64v v) { memcpy(p, &v, sizeof v); }

static inline f64v widen(f32v v, int half) {
    typedef float half_of_f32v __attribute__((vector_size(2 * LANES)));
    half_of_f32v x;
    memcpy(&x, (const char*)&v + half * sizeof x, sizeof x);
    return __builtin_convertvector(x, f64v);
}

// exp(x) for x <= 0, within 1e-11 of it; 0 below -700.  By its Taylor series around the nearest power of two.
static inline f64v exp(f64v x) {
    const i64v tiny = x < -700.0;
    x = tiny ? f64v{} : x;
    f64v shifted = x * 1.4426950408889634 + 6755399441055744.0;  // 1.5 * 2^52: the low bits are the nearest integer
    f64v r = x - (shifted - 6755399441055744.0) * 0.6931471805599453, p = r * 0.0 + 1.0 / 362880;
    const double terms[] = {1.0 / 40320, 1.0 / 5040, 1.0 / 720, 1.0 / 120, 1.0 / 24, 1.0 / 6, 0.5, 1.0, 1.0};
    for (double c : terms) p = p * r + c;
    return tiny ? f64v{} : (f64v)((i64v)p + ((i64v)shifted << 52));
}

// n: a multiple of LANES.
static inline double sum(const double* x, long n) {
    f64v even = {}, odd = {};
    for (long i = 0; i < n; i += LANES) even = even + load(x + i), odd = odd + load(x + i + LANES / 2);
    double total = 0;
    for (int i = 0; i < LANES / 2; i++) total += even[i] + odd[i];
    return total;
}

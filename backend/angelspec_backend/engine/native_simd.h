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
static inline f32v where(i32v mask, f32v a, f32v b) { return mask ? a : b; }

// Sum and maximum over the lanes, in a fixed tree order.
static inline float sum_lanes(f32v v) {
    float x[LANES];
    memcpy(x, &v, sizeof x);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) x[i] += x[i + width];
    return x[0];
}

static inline float max_lanes(f32v v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#else
    float best = v[0];
    for (int i = 1; i < LANES; i++) best = v[i] > best ? v[i] : best;
    return best;
#endif
}

// exp(x) within 2 ulp; 0 below the smallest normal result, x is clamped to 88 above.
static inline f32v exp(f32v x) {
    const f32v magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer in the low bits
    i32v tiny = x < splat(-87.0f);
    x = where(x > splat(88.0f), splat(88.0f), where(tiny, splat(-87.0f), x));
    f32v shifted = fma(x, splat(1.44269504f), magic);
    f32v n = shifted - magic;
    f32v r = fma(n, splat(-0.693359375f), x);
    r = fma(n, splat(2.12194440e-4f), r);
    f32v p = fma(r, splat(1.9875691500e-4f), splat(1.3981999507e-3f));
    p = fma(p, r, splat(8.3334519073e-3f));
    p = fma(p, r, splat(4.1665795894e-2f));
    p = fma(p, r, splat(1.6666665459e-1f));
    p = fma(p, r, splat(5.0000001201e-1f));
    p = fma(p, r * r, r) + splat(1.0f);
    i32v exponent = ((i32v)shifted - (i32v)magic) << 23;
    return where(tiny, f32v{}, (f32v)((i32v)p + exponent));
}

// Loads widen to float; stores of bf16 round to nearest even and keep NaN.
static inline f32v load(const float* p) {
    f32v v;
    memcpy(&v, p, sizeof v);
    return v;
}

static inline f32v load(const bf16* p) {
    u16v v;
    memcpy(&v, p, sizeof v);
#if defined(__AVX512F__)
    return (f32v)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)v), 16);
#else
    return (f32v)(__builtin_convertvector(v, u32v) << 16);
#endif
}

static inline u32v rounded_bits(f32v v) {  // bf16 in the upper half of each lane, the lower half undefined
    u32v bits = (u32v)v;
    u32v rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
    return v == v ? rounded : (bits | 0x400000u);
}

static inline void store(float* p, f32v v) { memcpy(p, &v, sizeof v); }

static inline void store(bf16* p, f32v v) {
#if defined(__AVX512F__)
    u16v narrow = (u16v)_mm512_cvtepi32_epi16((__m512i)(rounded_bits(v) >> 16));
#else
    u16v narrow = __builtin_convertvector(rounded_bits(v) >> 16, u16v);
#endif
    memcpy(p, &narrow, sizeof narrow);
}

// The value a float takes when it goes through T and back.
template <class T>
static inline f32v round_to(f32v v);
template <>
inline f32v round_to<float>(f32v v) { return v; }
template <>
inline f32v round_to<bf16>(f32v v) { return (f32v)(rounded_bits(v) & 0xffff0000u); }

// The same for the first n lanes; the others read as 0 and are not written.
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

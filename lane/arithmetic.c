/* The arithmetic of each dtype, compiled once for each instruction set: LANE_SET is its name.
 *
 * Elements are independent, so the compiler vectorises these loops as they are. The bits are those of numpy: float32
 * and float64 round to nearest, even; nothing flushes denormals; -ffp-contract=off keeps a product and a sum apart. */
#include "lane.h"

#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define EACH _Pragma("omp simd") for (size_t i = 0; i < size; i++)

INLINE uint32_t bits(float value) {
    uint32_t out;
    memcpy(&out, &value, sizeof out);
    return out;
}

INLINE float real(uint32_t value) {
    float out;
    memcpy(&out, &value, sizeof out);
    return out;
}

#define QUIET_NAN 0x7fc00000u

INLINE float float_of_bfloat16(uint16_t leaf) { return real((uint32_t)leaf << 16); }

INLINE uint16_t bfloat16_of_float(float sum) {
    uint32_t value = bits(sum);
    uint32_t rounded = (value + 0x7fff + (value >> 16 & 1)) >> 16;
    return sum != sum ? QUIET_NAN >> 16 : (uint16_t)rounded;
}

INLINE float float_of_float16(uint16_t leaf) {
    /* Shifted into place the exponent is 112 too small, which a product corrects exactly, denormals included. */
    uint32_t magnitude = (uint32_t)(leaf & 0x7fff) << 13, sign = (uint32_t)(leaf & 0x8000) << 16;
    uint32_t number = bits(real(magnitude) * 0x1p112f);
    return real((magnitude >= 0x0f800000 ? magnitude | 0x7f800000 : number) | sign);
}

INLINE uint16_t float16_of_float(float sum) {
    uint32_t value = bits(sum), sign = value >> 16 & 0x8000, magnitude = value & 0x7fffffff;
    /* Below 2^-14 the unit in the last place is 2^-24: adding 0.5 lets the processor round to that. */
    uint32_t denormal = bits(real(magnitude) + 0.5f) - bits(0.5f);
    uint32_t normal = (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
    uint32_t out = magnitude < 113u << 23 ? denormal : normal;
    out = magnitude >= 143u << 23 ? 0x7c00 : out;
    return sum != sum ? 0x7e00 : (uint16_t)(out | sign);
}

INLINE float float_of_float(float leaf) { return leaf; }
INLINE float float_of_sum(float sum) { return sum != sum ? real(QUIET_NAN) : sum; }
INLINE double double_of_double(double leaf) { return leaf; }
INLINE double double_of_sum(double sum) { return sum != sum ? __builtin_nan("") : sum; }
INLINE int16_t wide8(int8_t value) { return value; }
INLINE int16_t same16(int16_t value) { return value; }
INLINE uint32_t same32(uint32_t value) { return value; }
INLINE uint64_t same64(uint64_t value) { return value; }

#define ADD(name, SUM, LEFT, left_of, RIGHT, right_of)                                                         \
    static void name(void *to, const void *a, const void *b, size_t size) {                                    \
        SUM *out = to;                                                                                         \
        const LEFT *left = a;                                                                                  \
        const RIGHT *right = b;                                                                                \
        EACH out[i] = (SUM)(left_of(left[i]) + right_of(right[i]));                                            \
    }

/* The reciprocal of a power of two is exact, so the product has the bits of the quotient, in half the time. */
#define FINISH_FLOATS(name, LEAF, SUM, TOTAL, wide, narrow)                                                    \
    static void name(void *to, const void *from, size_t size, double divisor) {                                \
        LEAF *out = to;                                                                                        \
        const TOTAL *total = from;                                                                             \
        const SUM by = (SUM)divisor, reciprocal = (SUM)(1 / divisor);                                          \
        if (divisor == 0)                                                                                      \
            EACH out[i] = narrow(wide(total[i]));                                                              \
        else if (((uint64_t)divisor & ((uint64_t)divisor - 1)) == 0)                                           \
            EACH out[i] = narrow(wide(total[i]) * reciprocal);                                                 \
        else                                                                                                   \
            EACH out[i] = narrow(wide(total[i]) / by);                                                         \
    }

#define FLOATS(name, LEAF, SUM, same, wide, narrow)                                                            \
    ADD(name##_add_leaves, SUM, LEAF, wide, LEAF, wide)                                                        \
    ADD(name##_add_leaf, SUM, SUM, same, LEAF, wide)                                                           \
    ADD(name##_add_sums, SUM, SUM, same, SUM, same)                                                            \
    FINISH_FLOATS(name##_finish_leaf, LEAF, SUM, LEAF, wide, narrow)                                           \
    FINISH_FLOATS(name##_finish_sum, LEAF, SUM, SUM, same, narrow)

#define INTEGERS(name, INTEGER, same)                                                                          \
    ADD(name##_add_leaves, INTEGER, INTEGER, same, INTEGER, same)                                              \
    static void name##_finish_leaf(void *out, const void *total, size_t size, double divisor) {                \
        (void)divisor; /* a mean takes no integers */                                                          \
        memmove(out, total, size * sizeof(INTEGER));                                                           \
    }

FLOATS(bfloat16, uint16_t, float, float_of_float, float_of_bfloat16, bfloat16_of_float)
FLOATS(float16, uint16_t, float, float_of_float, float_of_float16, float16_of_float)
FLOATS(float32, float, float, float_of_float, float_of_float, float_of_sum)
FLOATS(float64, double, double, double_of_double, double_of_double, double_of_sum)
INTEGERS(int32, uint32_t, same32)
INTEGERS(int64, uint64_t, same64)

ADD(int8_add_leaves, int16_t, int8_t, wide8, int8_t, wide8)
ADD(int8_add_leaf, int16_t, int16_t, same16, int8_t, wide8)
ADD(int8_add_sums, int16_t, int16_t, same16, int16_t, same16)

static void int8_finish_leaf(void *to, const void *from, size_t size, double divisor) {
    (void)divisor;
    int16_t *out = to;
    const int8_t *total = from;
    EACH out[i] = total[i];
}

static void int8_finish_sum(void *out, const void *total, size_t size, double divisor) {
    (void)divisor;
    memmove(out, total, size * sizeof(int16_t));
}

static void int8_max(void *to, const void *a, const void *b, size_t size) {
    int8_t *out = to;
    const int8_t *left = a, *right = b;
    EACH out[i] = left[i] > right[i] ? left[i] : right[i];
}

static void int8_finish_max(void *out, const void *total, size_t size, double divisor) {
    (void)divisor;
    memmove(out, total, size);
}

#define OF_FLOATS(name, LEAF, SUM)                                                                             \
    {sizeof(LEAF),     sizeof(SUM),     sizeof(LEAF),       name##_add_leaves,                                 \
     name##_add_leaf,  name##_add_sums, name##_finish_leaf, name##_finish_sum}
#define OF_INTEGERS(name, INTEGER)                                                                             \
    {sizeof(INTEGER),   sizeof(INTEGER),   sizeof(INTEGER),    name##_add_leaves,                              \
     name##_add_leaves, name##_add_leaves, name##_finish_leaf, name##_finish_leaf}

#define JOIN(a, b) a##b
#define TABLE(set) JOIN(lane_arithmetic_, set)

const struct lane_arithmetic TABLE(LANE_SET)[LANE_DTYPES] = {
    [LANE_BFLOAT16] = OF_FLOATS(bfloat16, uint16_t, float), [LANE_FLOAT16] = OF_FLOATS(float16, uint16_t, float),
    [LANE_FLOAT32] = OF_FLOATS(float32, float, float),      [LANE_FLOAT64] = OF_FLOATS(float64, double, double),
    [LANE_INT32] = OF_INTEGERS(int32, uint32_t),            [LANE_INT64] = OF_INTEGERS(int64, uint64_t),
    [LANE_INT8] = {1, 2, 2, int8_add_leaves, int8_add_leaf, int8_add_sums, int8_finish_leaf, int8_finish_sum},
    [LANE_INT8_MAX] = {1, 1, 1, int8_max, int8_max, int8_max, int8_finish_max, int8_finish_max},
};

/* The compiled lane: the sums, and the loop of one exchange. What it does, bit for bit and frame for frame, is defined by
 * the Python beside it (jaxft/_exchange), which stays in use where this is not built. `_compiled.py` loads it. */
#ifndef LANE_H
#define LANE_H

#include <stddef.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))

/* Of the leaves. Unsigned integers are summed like signed ones: both wrap around. */
enum lane_dtype { LANE_BFLOAT16, LANE_FLOAT16, LANE_FLOAT32, LANE_FLOAT64, LANE_INT32, LANE_INT64, LANE_DTYPES };

/* The arithmetic of one dtype. A leaf is in the leaves' dtype, a sum in the dtype of sums. `out` may be an argument. */
struct lane_arithmetic {
    size_t leaf_bytes, sum_bytes;
    void (*add_leaves)(void *out, const void *left, const void *right, size_t size);
    void (*add_leaf)(void *out, const void *left, const void *right, size_t size);
    void (*add_sums)(void *out, const void *left, const void *right, size_t size);
    /* Divide unless the divisor is 0, make every NaN the one quiet NaN, and round to the leaves' dtype. */
    void (*finish_leaf)(void *out, const void *total, size_t size, double divisor);
    void (*finish_sum)(void *out, const void *total, size_t size, double divisor);
};

extern const struct lane_arithmetic lane_arithmetic_baseline[LANE_DTYPES];
#ifdef __x86_64__
extern const struct lane_arithmetic lane_arithmetic_avx2[LANE_DTYPES];
extern const struct lane_arithmetic lane_arithmetic_avx512[LANE_DTYPES];
#endif

/* The arithmetic that this processor runs best. */
const struct lane_arithmetic *lane_arithmetic_of(int dtype);

/* Sum sources in the order of the tree, and write the mean or the sum. The exported twin of `combine_into`.
 *
 * program: the tree in postfix order: a number of a source, or -1 for the sum of the last two.
 * summed: for each source, whether it is in the dtype of sums.
 * Returns 0; -1 for a program or dtype that cannot be, and then nothing was written. A source may be `out` itself. */
int lane_combine(int dtype, double divisor, const int32_t *program, size_t steps, const void *const *sources,
                 const uint8_t *summed, void *out, size_t size);

/* Add two nodes in the dtype of sums; `out` may be the left one. The exported twin of `add_into`. Returns like that. */
int lane_add(int dtype, int left_summed, int right_summed, void *out, const void *left, const void *right,
             size_t size);

#endif

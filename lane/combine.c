/* The sum in the order of the tree, block by block, so that what one pass writes the next reads from the cache. */
#include "lane.h"

#include <string.h>

#define BLOCK_BYTES 4096
/* A tree of 2^24 shards; a job has at most 65,536. */
#define MOST_DEPTH 26

struct value {
    const char *at;
    int summed;
};

static int can_add(int left_summed, int right_summed) {
    /* A left child is never smaller than its sibling, so a leaf on the left has a leaf on the right. */
    return left_summed || !right_summed;
}

static int is_tree(const int32_t *program, size_t steps, const uint8_t *summed) {
    int summed_at[MOST_DEPTH];
    size_t depth = 0;
    for (size_t i = 0; i < steps; i++) {
        if (program[i] >= 0) {
            if (depth == MOST_DEPTH)
                return 0;
            summed_at[depth++] = summed[program[i]];
            continue;
        }
        if (depth < 2 || !can_add(summed_at[depth - 2], summed_at[depth - 1]))
            return 0;
        summed_at[--depth - 1] = 1;
    }
    return depth == 1;
}

static void add(const struct lane_arithmetic *math, char *out, struct value left, struct value right, size_t size) {
    if (!left.summed)
        math->add_leaves(out, left.at, right.at, size);
    else if (!right.summed)
        math->add_leaf(out, left.at, right.at, size);
    else
        math->add_sums(out, left.at, right.at, size);
}

EXPORT int lane_add_pairs(int dtype, int left_summed, int right_summed, size_t pairs, const void *const *lefts,
                          const void *const *rights, const uint64_t *sizes, const uint64_t *offsets, void *out) {
    if (dtype < 0 || dtype >= LANE_DTYPES || !can_add(left_summed, right_summed))
        return -1;
    const struct lane_arithmetic *math = lane_arithmetic_of(dtype);
    for (size_t i = 0; i < pairs; i++) {
        struct value left = {lefts[i], left_summed}, right = {rights[i], right_summed};
        add(math, (char *)out + offsets[i] * math->sum_bytes, left, right, sizes[i]);
    }
    return 0;
}

/* One block of a sum: where it is, which may be a source or `slots`. */
static struct value block_of(const struct lane_arithmetic *math, const int32_t *program, size_t steps,
                             const void *const *sources, const uint8_t *summed, size_t start, size_t count,
                             char slots[MOST_DEPTH][BLOCK_BYTES]) {
    struct value stack[MOST_DEPTH];
    size_t depth = 0;
    for (size_t i = 0; i < steps; i++) {
        int32_t source = program[i];
        if (source >= 0) {
            size_t item_bytes = summed[source] ? math->sum_bytes : math->leaf_bytes;
            stack[depth++] = (struct value){(const char *)sources[source] + start * item_bytes, summed[source]};
            continue;
        }
        depth--;
        add(math, slots[depth - 1], stack[depth - 1], stack[depth], count);
        stack[depth - 1] = (struct value){slots[depth - 1], 1};
    }
    return stack[0];
}

EXPORT int lane_combine(int dtype, double divisor, const int32_t *program, size_t steps, const void *const *sources,
                        const uint8_t *summed, void *out, size_t size) {
    if (dtype < 0 || dtype >= LANE_DTYPES || !is_tree(program, steps, summed))
        return -1;
    const struct lane_arithmetic *math = lane_arithmetic_of(dtype);
    const size_t block = BLOCK_BYTES / math->sum_bytes;
    _Alignas(64) char slots[MOST_DEPTH][BLOCK_BYTES];
    for (size_t start = 0; start < size; start += block) {
        size_t count = size - start < block ? size - start : block;
        struct value sum = block_of(math, program, steps, sources, summed, start, count, slots);
        char *to = (char *)out + start * math->result_bytes;
        (sum.summed ? math->finish_sum : math->finish_leaf)(to, sum.at, count, divisor);
    }
    return 0;
}

EXPORT int lane_sum(int dtype, const int32_t *program, size_t steps, const void *const *sources, const uint8_t *summed,
                    void *out, size_t size) {
    if (dtype < 0 || dtype >= LANE_DTYPES || !is_tree(program, steps, summed))
        return -1;
    const struct lane_arithmetic *math = lane_arithmetic_of(dtype);
    const size_t block = BLOCK_BYTES / math->sum_bytes;
    _Alignas(64) char slots[MOST_DEPTH][BLOCK_BYTES];
    for (size_t start = 0; start < size; start += block) {
        size_t count = size - start < block ? size - start : block;
        struct value sum = block_of(math, program, steps, sources, summed, start, count, slots);
        size_t item_bytes = sum.summed ? math->sum_bytes : math->leaf_bytes;
        memcpy((char *)out + start * item_bytes, sum.at, count * item_bytes);
    }
    return 0;
}

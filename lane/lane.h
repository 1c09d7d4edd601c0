/* The compiled lane: the sums, and the loop of one exchange. What it does, bit for bit and frame for frame, is defined by
 * the Python beside it (jaxft/_exchange), which stays in use where this is not built. `_compiled.py` loads it. */
#ifndef LANE_H
#define LANE_H

#include <stddef.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))

/* Of the leaves. Unsigned integers are summed like signed ones: both wrap around. */
enum lane_dtype {
    LANE_BFLOAT16,
    LANE_FLOAT16,
    LANE_FLOAT32,
    LANE_FLOAT64,
    LANE_INT32,
    LANE_INT64,
    LANE_INT8,     /* summed in int16, which is also the result's */
    LANE_INT8_MAX, /* in place of a sum the larger value */
    LANE_DTYPES
};

/* The arithmetic of one dtype. A leaf is in the leaves' dtype, a sum in the dtype of sums, and a result in that of
 * leaves but for LANE_INT8. `out` may be an argument. */
struct lane_arithmetic {
    size_t leaf_bytes, sum_bytes, result_bytes;
    void (*add_leaves)(void *out, const void *left, const void *right, size_t size);
    void (*add_leaf)(void *out, const void *left, const void *right, size_t size);
    void (*add_sums)(void *out, const void *left, const void *right, size_t size);
    /* Divide unless the divisor is 0, make every NaN the one quiet NaN, and round to the results' dtype. */
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

/* Use the best instruction set of this processor, or only the named one; a test compares them. Returns its name, or NULL
 * if this processor does not have it. Not while another thread uses the lane. */
const char *lane_use(const char *name);

#define LANE_HEADER_BYTES 64
#define LANE_MOST_TAG_BYTES 16
#define LANE_KEY_BYTES 32
#define LANE_MOST_POWERS 32

/* What the MACs of one key are made with. */
struct lane_mac {
    uint8_t round_keys[15][16];
    uint8_t powers[LANE_MOST_POWERS][16]; /* of the hash key, the highest first */
};

/* The MACs of one set of instructions. The header has LANE_HEADER_BYTES, and the tag 16 bytes. */
struct lane_macs {
    const char *name;
    void (*expand)(struct lane_mac *mac, const uint8_t *key);
    void (*tag)(const struct lane_mac *mac, uint64_t count, const uint8_t *header, const void *payload, size_t bytes,
                uint8_t *tag);
};

#ifdef __x86_64__
extern const struct lane_macs lane_macs_pclmul, lane_macs_vpclmul;
#else
extern const struct lane_macs lane_macs_pmull;
#endif

/* The MACs in use and their name; NULL if this processor has no instructions for them. Python then makes them. */
const struct lane_macs *lane_macs_in_use(void);
const char *lane_macs_name(void);

/* The tag of one frame under one key. The exported twin of `Macs`. Returns -1 without instructions for it. */
int lane_mac(const uint8_t *key, uint64_t count, const uint8_t *header, const void *payload, size_t bytes,
             uint8_t *tag);

/* Sum sources in the order of the tree, and write the mean or the sum. The exported twin of `combine_into`.
 *
 * program: the tree in postfix order: a number of a source, or -1 for the sum of the last two.
 * summed: for each source, whether it is in the dtype of sums.
 * Returns 0; -1 for a program or dtype that cannot be, and then nothing was written. A source may be `out` itself. */
int lane_combine(int dtype, double divisor, const int32_t *program, size_t steps, const void *const *sources,
                 const uint8_t *summed, void *out, size_t size);

/* The sum itself: in the dtype of sums, or of the leaves if it is a single contribution. The exported twin of
 * `sum_into`. Returns like `lane_combine`. No source may be `out`. */
int lane_sum(int dtype, const int32_t *program, size_t steps, const void *const *sources, const uint8_t *summed,
             void *out, size_t size);

/* Add the leaves of two nodes, pair by pair, in the dtype of sums. The sum of a pair has `sizes` elements, and lies
 * `offsets` elements into `out`; it may be where its left one is. The exported twin of `add_into`. Returns like
 * `lane_combine`. */
int lane_add_pairs(int dtype, int left_summed, int right_summed, size_t pairs, const void *const *lefts,
                   const void *const *rights, const uint64_t *sizes, const uint64_t *offsets, void *out);

/* One exchange. `_compiled_lane.py` fills in the plan; every pointer stays valid until `lane_close`. */

struct lane_region {
    double divisor; /* 0: the sum itself */
    char *result;
    uint64_t first; /* where the part that I reduce begins */
    int32_t dtype;
};

/* A node that I sum chunks up to and keep, instead of the result. */
struct lane_kept {
    const int32_t *program;
    uint32_t steps, single;
    char *const *at; /* by region: where the part that I reduce begins */
};

/* Elements of a region, all reduced by one member. */
struct lane_chunk {
    uint64_t offset, size;
    uint32_t region;
};

/* A node that some member holds. Nodes are in the order of their first shard. */
struct lane_node {
    uint32_t owner;
    uint32_t single; /* one contribution, in the leaves' dtype */
    uint32_t pieces; /* of one of my own nodes: where its table of regions begins in `first_piece` */
};

/* Elements of a region of one of my own nodes that lie together; what lies between two pieces is zero. */
struct lane_piece {
    uint64_t offset, size;
    const char *at;
};

/* What is sent and received, in order. Headers lie one after another. */
struct lane_member {
    int32_t fd; /* non-blocking; -1 for myself */
    uint32_t chunks_size, nodes_size;
    const struct lane_chunk *chunks; /* that this member reduces */
    const uint32_t *nodes;           /* that this member holds */
    const uint8_t *partials_in;      /* headers: for each of my chunks, of each of its nodes */
    const uint8_t *results_in;       /* for each of its chunks; NULL in a single trip */
    const uint8_t *partials_out;     /* for each of its chunks, of each of my nodes */
    const uint8_t *progress_in;      /* of what it sends to say that bytes of an earlier round move; or NULL */
};

/* One direction of a connection: its key, and the sequence number of its next frame, which C and Python both advance. */
struct lane_secret {
    const uint8_t *key;
    uint64_t *count;
};

struct lane_plan {
    uint32_t me, members_size, nodes_size, kept_size, steps, tag_bytes, window, in_place;
    int32_t abort_fd;
    uint64_t pending_bytes; /* a channel's queue is filled up to here */
    uint64_t chunk_bytes;   /* of the longest payload */
    const struct lane_member *members;
    struct lane_region *regions;
    const struct lane_node *nodes;
    const int32_t *program; /* of the result; no steps: it is kept nodes that are summed, or it is there already */
    const struct lane_kept *kept;
    const uint32_t *first_piece; /* for each of my nodes and region, and one more at the end */
    const struct lane_piece *pieces;
    char *const *scratch;       /* by slot of the window, and node: what others' values are received into */
    const uint8_t *results_out; /* headers; NULL in a single trip */
    uint32_t heeds_progress;     /* what others send of that kind counts as moved bytes */
    /* For MACs: for each member what is sent to it, and what it sends. NULL: `digest` makes the tags. */
    const struct lane_secret *secrets;
    /* The checksum of a frame. NULL, and no secrets: `tag` makes the tags. */
    uint64_t (*digest)(const void *data, size_t bytes, uint64_t seed);
    /* Make the tag of the next frame of one direction of a connection. Returns not 0 to fail. */
    int (*tag)(uint32_t member, int incoming, const uint8_t *header, const void *payload, size_t bytes, uint8_t *tag);
};

enum lane_turn { LANE_STILL, LANE_MOVED, LANE_DONE, LANE_FAILED };
enum lane_why { LANE_NO_MEMORY, LANE_CLOSED, LANE_ERROR, LANE_UNEXPECTED, LANE_DAMAGED, LANE_NO_TAG, LANE_POLL, LANE_NO_TREE };

struct lane_failure {
    uint32_t why, member;
    int32_t error;                     /* an errno */
    uint32_t results, partials;        /* how many frames of each kind this member had sent */
    uint8_t header[LANE_HEADER_BYTES]; /* what it sent instead of the next one */
};

struct lane_look {
    double moved_s;       /* when bytes last moved, on the clock of time.monotonic() */
    uint32_t owes;        /* it owes partial sums, which it can send without waiting for any other member */
    uint32_t is_watched;  /* it has something to send or to receive */
    uint32_t is_idle;     /* nothing is queued for it */
};

/* The sizes of region, chunk, node, kept, piece, member, secret, plan, failure and look, and the number of dtypes, by
 * which Python knows a stale library. */
#define LANE_SIZES 11
void lane_sizes(uint32_t sizes[LANE_SIZES]);

/* Write a byte to a socket at each interval, until `stop_fd` is readable or the socket fails: this process lives. */
void lane_live(int fd, int stop_fd, double interval_s);

struct lane;

/* Begin an exchange. Returns NULL without memory. The plan is copied, but not what it points to. */
struct lane *lane_open(const struct lane_plan *plan);
void lane_close(struct lane *lane);

/* Exchange until the time is over, all is done, the abort flag is set, a signal arrived or something failed. */
int lane_turn(struct lane *lane, double seconds);
void lane_looks(const struct lane *lane, struct lane_look *looks);
void lane_why(const struct lane *lane, struct lane_failure *failure);

#endif

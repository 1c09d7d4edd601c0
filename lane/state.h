/* What the parts of one exchange share: the loop (`loop.c`) and its channels (`channel.c`). */
#ifndef LANE_STATE_H
#define LANE_STATE_H

#include "lane.h"

/* At most this many frames wait in a channel, and go into one system call. */
#define MOST_FRAMES 16
#define NONE UINT32_MAX
/* In place of a chunk: a frame that only says that bytes move, without a payload. */
#define PROGRESS (UINT32_MAX - 1)

struct outgoing {
    const uint8_t *header;
    const char *payload;
    size_t bytes;
    int gathered; /* the payload is in the channel's own buffer, which holds one */
    uint8_t tag[LANE_MOST_TAG_BYTES];
};

struct channel {
    const struct lane_member *member;
    uint32_t number;
    double moved_s;

    /* Sending: a queue, of which `sent` bytes of the first frame are gone. */
    struct outgoing queue[MOST_FRAMES];
    uint32_t queued, results_out, partials_out; /* the numbers of frames that were queued, of each kind */
    size_t sent, pending_bytes;
    char *gather;
    int gather_in_use;

    /* Receiving: `payload` of the current frame, then its tag and the header of the next one, into `tail`. */
    uint32_t results_in, partials_in; /* the numbers of frames whose headers have come */
    uint32_t results_size, partials_size;
    uint32_t chunk, node; /* of the current frame; chunk is NONE between frames, node NONE for a result */
    int paused;           /* there is no room for its payload yet */
    const uint8_t *header;
    char *payload;
    size_t payload_bytes, payload_have, tail_have, tail_want;
    uint8_t tail[LANE_MOST_TAG_BYTES + LANE_HEADER_BYTES];
};

struct lane {
    struct lane_plan plan;
    struct channel *channels; /* by member; mine is unused */
    struct pollfd *polled;    /* by member; mine is the abort flag */
    uint32_t *missing;        /* for each of my chunks, how many parts have not arrived */
    uint32_t next;            /* the first of my chunks that is not combined */
    const struct lane_macs *macs; /* that `keys` were made for */
    struct lane_mac *keys;    /* of the plan's secrets; NULL without */
    uint8_t *result_tags;     /* of my chunks, where they are the same for all */
    char **gather;            /* by node, of mine: what spans several pieces */
    const void **sources;
    uint8_t *summed;
    struct lane_failure failure;
};

double lane_now_s(void);
int lane_fail(struct lane *lane, const struct channel *channel, int why, int error);

static inline const struct lane_member *lane_me(const struct lane *lane) { return &lane->plan.members[lane->plan.me]; }
static inline const struct lane_arithmetic *lane_math(const struct lane *lane, const struct lane_chunk *chunk) {
    return lane_arithmetic_of(lane->plan.regions[chunk->region].dtype);
}
static inline size_t lane_item_bytes(const struct lane *lane, const struct lane_chunk *chunk, uint32_t node) {
    const struct lane_arithmetic *math = lane_math(lane, chunk);
    if (node == NONE)
        return math->result_bytes;
    return lane->plan.nodes[node].single ? math->leaf_bytes : math->sum_bytes;
}
static inline char *lane_result(const struct lane *lane, const struct lane_chunk *chunk) {
    return lane->plan.regions[chunk->region].result + chunk->offset * lane_math(lane, chunk)->result_bytes;
}

/* A chunk of one of my own nodes: where it lies, or gathered into *buffer, which is allocated at first use. NULL
 * without memory. */
const char *lane_own(const struct lane *lane, uint32_t node, const struct lane_chunk *chunk, char **buffer);
/* Where a chunk of another member's node is received. */
char *lane_received(const struct lane *lane, uint32_t chunk, uint32_t node);
int lane_tag(struct lane *lane, uint32_t member, int incoming, const uint8_t *header, const void *payload,
             size_t bytes, uint8_t *tag);

/* Each returns -1 if it failed. Bytes moved otherwise. */
int lane_refill(struct lane *lane, struct channel *channel);
long lane_send(struct lane *lane, struct channel *channel);
long lane_receive(struct lane *lane, struct channel *channel);
/* Request room again for the payload of a paused channel. */
void lane_resume(struct lane *lane, struct channel *channel);

static inline int lane_is_receiving(const struct channel *channel) {
    return channel->chunk != NONE || channel->results_in < channel->results_size ||
           channel->partials_in < channel->partials_size;
}

#endif

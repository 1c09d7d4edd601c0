/* One exchange: what `_exchange.py` describes, in one thread around one poll. The twin of _python_lane.py.
 *
 * This moves and sums; Python decides. It reads no configuration, keeps no time but that of the last movement, and
 * returns to Python every so often, which looks at the abort flag, the deadline and who is late. */
#define _GNU_SOURCE
#include "state.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

double lane_now_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

int lane_fail(struct lane *lane, const struct channel *channel, int why, int error) {
    struct lane_failure *failure = &lane->failure;
    failure->why = (uint32_t)why;
    failure->error = error;
    failure->member = channel == NULL ? lane->plan.me : channel->number;
    if (channel != NULL) {
        failure->results = channel->results_in;
        failure->partials = channel->partials_in;
        memcpy(failure->header, channel->tail, LANE_HEADER_BYTES);
    }
    return -1;
}

int lane_tag(struct lane *lane, uint32_t member, int incoming, const uint8_t *header, const void *payload,
             size_t bytes, uint8_t *tag) {
    if (lane->keys != NULL) {
        const uint32_t direction = 2 * member + (uint32_t)incoming;
        lane->macs->tag(&lane->keys[direction], (*lane->plan.secrets[direction].count)++, header, payload, bytes, tag);
        return 0;
    }
    if (lane->plan.digest == NULL)
        return lane->plan.tag(member, incoming, header, payload, bytes, tag)
                   ? lane_fail(lane, &lane->channels[member], LANE_NO_TAG, 0)
                   : 0;
    uint64_t seed = lane->plan.digest(header, LANE_HEADER_BYTES, 0);
    uint64_t digest = lane->plan.digest(payload, bytes, seed);
    for (int i = 0; i < 8; i++)
        tag[i] = (uint8_t)(digest >> (56 - 8 * i));
    return 0;
}

const char *lane_own(const struct lane *lane, uint32_t node, const struct lane_chunk *chunk, char **buffer) {
    const struct lane_plan *plan = &lane->plan;
    const uint32_t *first = &plan->first_piece[plan->nodes[node].pieces + chunk->region];
    const size_t item_bytes = lane_item_bytes(lane, chunk, node);
    const uint64_t start = chunk->offset, stop = start + chunk->size;
    uint32_t low = first[0], high = first[1]; /* the last piece that begins at or before `start` */
    while (high - low > 1) {
        uint32_t middle = low + (high - low) / 2;
        *(plan->pieces[middle].offset <= start ? &low : &high) = middle;
    }
    const struct lane_piece *piece = &plan->pieces[low], *end = &plan->pieces[first[1]];
    if (stop <= piece->offset + piece->size)
        return piece->at + (start - piece->offset) * item_bytes;
    if (*buffer == NULL && (*buffer = malloc(plan->chunk_bytes)) == NULL)
        return NULL;
    uint64_t filled = start;
    for (; piece < end && piece->offset < stop; piece++) {
        if (piece->offset > filled) { /* the padding before it */
            memset(*buffer + (filled - start) * item_bytes, 0, (piece->offset - filled) * item_bytes);
            filled = piece->offset;
        }
        uint64_t to = piece->offset + piece->size < stop ? piece->offset + piece->size : stop;
        if (to <= filled)
            continue;
        memcpy(*buffer + (filled - start) * item_bytes, piece->at + (filled - piece->offset) * item_bytes,
               (to - filled) * item_bytes);
        filled = to;
    }
    memset(*buffer + (filled - start) * item_bytes, 0, (stop - filled) * item_bytes);
    return *buffer;
}

char *lane_received(const struct lane *lane, uint32_t number, uint32_t node) {
    const struct lane_chunk *chunk = &lane_me(lane)->chunks[number];
    if (node == lane->plan.in_place && lane_item_bytes(lane, chunk, node) == lane_math(lane, chunk)->result_bytes)
        return lane_result(lane, chunk);
    return lane->plan.scratch[number % lane->plan.window * lane->plan.nodes_size + node];
}

static int can_combine(const struct lane *lane) {
    return lane->next < lane_me(lane)->chunks_size && lane->missing[lane->next] == 0;
}

static int combine(struct lane *lane) {
    const struct lane_plan *plan = &lane->plan;
    const uint32_t number = lane->next;
    const struct lane_chunk *chunk = &lane_me(lane)->chunks[number];
    const struct lane_arithmetic *math = lane_math(lane, chunk);
    const struct lane_region *region = &plan->regions[chunk->region];
    for (uint32_t node = 0; node < plan->nodes_size; node++) {
        lane->summed[node] = !plan->nodes[node].single || math->leaf_bytes == math->sum_bytes;
        lane->sources[node] = plan->nodes[node].owner == plan->me
                                  ? lane_own(lane, node, chunk, &lane->gather[node])
                                  : lane_received(lane, number, node);
        if (lane->sources[node] == NULL)
            return lane_fail(lane, NULL, LANE_NO_MEMORY, 0);
    }
    char *out = lane_result(lane, chunk);
    if (plan->steps > 0 && lane_combine(region->dtype, region->divisor, plan->program, plan->steps, lane->sources,
                                        lane->summed, out, chunk->size))
        return lane_fail(lane, NULL, LANE_NO_TREE, 0);
    for (uint32_t i = 0; i < plan->kept_size; i++) {
        const struct lane_kept *kept = &plan->kept[i];
        char *to = kept->at[chunk->region] +
                   (chunk->offset - region->first) * (kept->single ? math->leaf_bytes : math->sum_bytes);
        if (lane_sum(region->dtype, kept->program, kept->steps, lane->sources, lane->summed, to, chunk->size))
            return lane_fail(lane, NULL, LANE_NO_TREE, 0);
    }
    if (plan->results_out != NULL && plan->digest != NULL)
        lane_tag(lane, plan->me, 0, plan->results_out + (size_t)number * LANE_HEADER_BYTES, out,
                 chunk->size * math->result_bytes, lane->result_tags + (size_t)number * LANE_MOST_TAG_BYTES);
    lane->next++;
    for (uint32_t peer = 0; peer < plan->members_size; peer++) {
        struct channel *channel = &lane->channels[peer];
        if (channel->paused) {
            lane_resume(lane, channel);
            channel->moved_s = lane_now_s(); /* we paused it, so it is not late */
        }
    }
    return 0;
}

/* Poll each connection for what its channel can do next. Returns how many can do anything, or -1. */
static int watch(struct lane *lane) {
    int watched = 0;
    for (uint32_t peer = 0; peer < lane->plan.members_size; peer++) {
        if (peer == lane->plan.me)
            continue;
        struct channel *channel = &lane->channels[peer];
        struct pollfd *polled = &lane->polled[peer];
        if (lane_refill(lane, channel))
            return -1;
        polled->events = channel->queued ? POLLOUT : 0;
        if (channel->paused)
            polled->events |= POLLRDHUP; /* no buffer for its bytes, but notice a disconnect */
        else if (lane_is_receiving(channel))
            polled->events |= POLLIN;
        polled->fd = polled->events ? channel->member->fd : -1;
        watched += polled->events != 0;
    }
    return watched;
}

/* Returns the bytes moved, or -1. */
static long serve(struct lane *lane, struct channel *channel, int events) {
    long received = 0, sent = 0;
    if (lane_is_receiving(channel) && events & ~POLLOUT && (received = lane_receive(lane, channel)) < 0)
        return -1;
    if (channel->queued && events & ~POLLIN && (sent = lane_send(lane, channel)) < 0)
        return -1;
    if (received + sent > 0)
        channel->moved_s = lane_now_s();
    return received + sent;
}

EXPORT int lane_turn(struct lane *lane, double seconds) {
    const double end_s = lane_now_s() + seconds;
    const uint32_t me = lane->plan.me;
    int turn = LANE_STILL;
    for (;;) {
        if (can_combine(lane) && combine(lane))
            return LANE_FAILED;
        int watched = watch(lane);
        if (watched < 0)
            return LANE_FAILED;
        if (watched == 0 && lane->next == lane_me(lane)->chunks_size)
            return LANE_DONE;
        double wait_s = can_combine(lane) ? 0 : end_s - lane_now_s();
        wait_s = wait_s > 0 ? wait_s : 0;
        struct timespec wait = {(time_t)wait_s, (long)(1e9 * (wait_s - (double)(time_t)wait_s))};
        int ready = ppoll(lane->polled, lane->plan.members_size, &wait, NULL);
        if (ready < 0 && errno == EINTR)
            return turn; /* Python runs the signal's handler */
        if (ready < 0)
            return lane_fail(lane, NULL, LANE_POLL, errno), LANE_FAILED;
        if (lane->polled[me].revents)
            return turn; /* aborted */
        for (uint32_t peer = 0; ready > 0 && peer < lane->plan.members_size; peer++) {
            if (lane->polled[peer].fd < 0 || lane->polled[peer].revents == 0)
                continue;
            long moved = serve(lane, &lane->channels[peer], lane->polled[peer].revents);
            if (moved < 0)
                return LANE_FAILED;
            turn = moved > 0 ? LANE_MOVED : turn;
        }
        if (lane_now_s() >= end_s)
            return turn;
    }
}

EXPORT void lane_looks(const struct lane *lane, struct lane_look *looks) {
    for (uint32_t peer = 0; peer < lane->plan.members_size; peer++) {
        const struct channel *channel = &lane->channels[peer];
        int is_arriving = channel->chunk != NONE && channel->node != NONE;
        looks[peer].moved_s = channel->moved_s;
        looks[peer].owes = !channel->paused && (is_arriving || channel->partials_in < channel->partials_size);
        looks[peer].is_idle = channel->queued == 0;
        looks[peer].is_watched = peer != lane->plan.me && lane->polled[peer].events != 0;
    }
}

EXPORT void lane_live(int fd, int stop_fd, double interval_s) {
    struct pollfd stop = {.fd = stop_fd, .events = POLLIN};
    for (;;) {
        int ready = poll(&stop, 1, (int)(1e3 * interval_s));
        if (ready > 0 || (ready < 0 && errno != EINTR))
            return;
        /* Where the other side does not read, its buffer is full of signs of life. */
        if (send(fd, "!", 1, MSG_DONTWAIT | MSG_NOSIGNAL) < 0 && errno != EAGAIN && errno != EINTR)
            return;
    }
}

EXPORT void lane_why(const struct lane *lane, struct lane_failure *failure) { *failure = lane->failure; }

EXPORT void lane_sizes(uint32_t sizes[LANE_SIZES]) {
    const size_t known[LANE_SIZES] = {
        sizeof(struct lane_region), sizeof(struct lane_chunk),  sizeof(struct lane_node),
        sizeof(struct lane_kept),   sizeof(struct lane_piece),  sizeof(struct lane_member),
        sizeof(struct lane_secret), sizeof(struct lane_plan),   sizeof(struct lane_failure),
        sizeof(struct lane_look),   LANE_DTYPES,
    };
    for (int i = 0; i < LANE_SIZES; i++)
        sizes[i] = (uint32_t)known[i];
}

static void open_channel(struct lane *lane, uint32_t peer) {
    struct channel *channel = &lane->channels[peer];
    channel->member = &lane->plan.members[peer];
    channel->number = peer;
    channel->chunk = NONE;
    channel->moved_s = lane_now_s();
    if (peer == lane->plan.me)
        return;
    channel->partials_size = lane_me(lane)->chunks_size * channel->member->nodes_size;
    channel->results_size = channel->member->results_in == NULL ? 0 : channel->member->chunks_size;
    channel->tail_want = lane_is_receiving(channel) ? LANE_HEADER_BYTES : 0;
}

static int expand_keys(struct lane *lane) {
    lane->macs = lane_macs_in_use();
    lane->keys = calloc(2 * (size_t)lane->plan.members_size, sizeof *lane->keys);
    if (lane->keys == NULL)
        return -1;
    for (uint32_t i = 0; i < 2 * lane->plan.members_size; i++)
        if (i / 2 != lane->plan.me)
            lane->macs->expand(&lane->keys[i], lane->plan.secrets[i].key);
    return 0;
}

EXPORT struct lane *lane_open(const struct lane_plan *plan) {
    struct lane *lane = calloc(1, sizeof *lane);
    if (lane == NULL)
        return NULL;
    const uint32_t members = plan->members_size, nodes = plan->nodes_size;
    const uint32_t chunks = plan->members[plan->me].chunks_size;
    lane->plan = *plan;
    lane->channels = calloc(members, sizeof *lane->channels);
    lane->polled = calloc(members, sizeof *lane->polled);
    lane->missing = calloc(chunks + 1, sizeof *lane->missing);
    lane->result_tags = calloc(chunks + 1, LANE_MOST_TAG_BYTES);
    lane->gather = calloc(nodes + 1, sizeof *lane->gather); /* there may be no node, and calloc(0) may be NULL */
    lane->sources = calloc(nodes + 1, sizeof *lane->sources);
    lane->summed = calloc(nodes + 1, sizeof *lane->summed);
    if (!lane->channels || !lane->polled || !lane->missing || !lane->result_tags || !lane->gather || !lane->sources ||
        !lane->summed) {
        lane_close(lane);
        return NULL;
    }
    if (plan->secrets != NULL && expand_keys(lane)) {
        lane_close(lane);
        return NULL;
    }
    for (uint32_t i = 0; i < chunks; i++)
        lane->missing[i] = nodes - plan->members[plan->me].nodes_size;
    for (uint32_t peer = 0; peer < members; peer++)
        open_channel(lane, peer);
    lane->polled[plan->me] = (struct pollfd){.fd = plan->abort_fd, .events = POLLIN};
    return lane;
}

EXPORT void lane_close(struct lane *lane) {
    for (uint32_t peer = 0; lane->channels && peer < lane->plan.members_size; peer++)
        free(lane->channels[peer].gather);
    for (uint32_t node = 0; lane->gather && node < lane->plan.nodes_size; node++)
        free(lane->gather[node]);
    free(lane->channels);
    free(lane->polled);
    free(lane->missing);
    free(lane->keys);
    free(lane->result_tags);
    free(lane->gather);
    free(lane->sources);
    free(lane->summed);
    free(lane);
}

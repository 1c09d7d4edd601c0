/* One peer's connection during one exchange: it sends and receives frames, and never blocks. The twin of _channel.py.
 *
 * A frame is a header, its payload, and the tag of both. A header is compared with the only two that can come next
 * before a byte of payload is read, and a payload counts only once its tag has been verified. */
#define _GNU_SOURCE
#include "state.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>

#define PARTS 3 /* header, payload, tag */

/* ---- sending ---- */

/* The next frame but its tag: results first, since a peer may need only them to finish. Returns 1, 0 if there is none
 * now, or -1. */
static int next_frame(struct lane *lane, struct channel *channel, struct outgoing *frame) {
    const struct lane_plan *plan = &lane->plan;
    if (plan->results_out != NULL && channel->results_out < lane->next) {
        uint32_t number = channel->results_out++;
        const struct lane_chunk *chunk = &lane_me(lane)->chunks[number];
        frame->header = plan->results_out + (size_t)number * LANE_HEADER_BYTES;
        frame->payload = lane_result(lane, chunk);
        frame->bytes = chunk->size * lane_math(lane, chunk)->result_bytes;
        frame->gathered = 0;
        if (plan->digest != NULL) {
            memcpy(frame->tag, lane->result_tags + (size_t)number * LANE_MOST_TAG_BYTES, LANE_MOST_TAG_BYTES);
            return 1;
        }
    } else {
        uint32_t mine = lane_me(lane)->nodes_size, number = channel->partials_out;
        if (channel->gather_in_use || number == mine * channel->member->chunks_size)
            return 0;
        channel->partials_out++;
        uint32_t node = lane_me(lane)->nodes[number % mine];
        const struct lane_chunk *chunk = &channel->member->chunks[number / mine];
        frame->header = channel->member->partials_out + (size_t)number * LANE_HEADER_BYTES;
        frame->payload = lane_own(lane, node, chunk, &channel->gather);
        frame->bytes = chunk->size * lane_item_bytes(lane, chunk, node);
        if (frame->payload == NULL)
            return lane_fail(lane, channel, LANE_NO_MEMORY, 0);
        frame->gathered = channel->gather_in_use = frame->payload == channel->gather;
    }
    return lane_tag(lane, channel->number, 0, frame->header, frame->payload, frame->bytes, frame->tag) ? -1 : 1;
}

int lane_refill(struct lane *lane, struct channel *channel) {
    while (channel->queued < MOST_FRAMES && channel->pending_bytes < lane->plan.pending_bytes) {
        struct outgoing *frame = &channel->queue[channel->queued];
        int found = next_frame(lane, channel, frame);
        if (found <= 0)
            return found;
        channel->queued++;
        channel->pending_bytes += LANE_HEADER_BYTES + frame->bytes + lane->plan.tag_bytes;
    }
    return 0;
}

static void drop_sent(struct lane *lane, struct channel *channel, size_t sent) {
    uint32_t whole = 0;
    channel->pending_bytes -= sent;
    channel->sent += sent;
    while (whole < channel->queued) {
        const struct outgoing *frame = &channel->queue[whole];
        size_t bytes = LANE_HEADER_BYTES + frame->bytes + lane->plan.tag_bytes;
        if (channel->sent < bytes)
            break;
        channel->sent -= bytes;
        channel->gather_in_use &= !frame->gathered;
        whole++;
    }
    channel->queued -= whole;
    memmove(channel->queue, channel->queue + whole, channel->queued * sizeof *channel->queue);
}

long lane_send(struct lane *lane, struct channel *channel) {
    struct iovec parts[PARTS * MOST_FRAMES];
    size_t skip = channel->sent, used = 0;
    for (uint32_t i = 0; i < channel->queued; i++) {
        struct outgoing *frame = &channel->queue[i];
        struct iovec of_frame[PARTS] = {
            {(void *)frame->header, LANE_HEADER_BYTES},
            {(void *)frame->payload, frame->bytes},
            {frame->tag, lane->plan.tag_bytes},
        };
        for (int part = 0; part < PARTS; part++) {
            size_t gone = skip < of_frame[part].iov_len ? skip : of_frame[part].iov_len;
            skip -= gone;
            if (gone < of_frame[part].iov_len)
                parts[used++] = (struct iovec){(char *)of_frame[part].iov_base + gone, of_frame[part].iov_len - gone};
        }
    }
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = used};
    ssize_t sent = sendmsg(channel->member->fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0)
        return errno == EAGAIN || errno == EINTR ? 0 : lane_fail(lane, channel, LANE_ERROR, errno);
    drop_sent(lane, channel, (size_t)sent);
    return sent;
}

/* ---- receiving ---- */

void lane_resume(struct lane *lane, struct channel *channel) {
    const struct lane_chunk *chunk;
    if (channel->node == NONE) {
        chunk = &channel->member->chunks[channel->chunk];
        channel->payload = lane_result(lane, chunk);
    } else {
        channel->paused = channel->chunk - lane->next >= lane->plan.window;
        if (channel->paused)
            return;
        chunk = &lane_me(lane)->chunks[channel->chunk];
        channel->payload = lane_received(lane, channel->chunk, channel->node);
    }
    channel->payload_bytes = chunk->size * lane_item_bytes(lane, chunk, channel->node);
    channel->payload_have = 0;
}

/* The header in `tail` is complete: begin the frame that it announces. */
static int begin(struct lane *lane, struct channel *channel) {
    const struct lane_member *member = channel->member;
    const uint8_t *result = member->results_in + (size_t)channel->results_in * LANE_HEADER_BYTES;
    const uint8_t *partial = member->partials_in + (size_t)channel->partials_in * LANE_HEADER_BYTES;
    if (channel->results_in < channel->results_size && memcmp(channel->tail, result, LANE_HEADER_BYTES) == 0) {
        channel->header = result;
        channel->chunk = channel->results_in++;
        channel->node = NONE;
    } else if (channel->partials_in < channel->partials_size &&
               memcmp(channel->tail, partial, LANE_HEADER_BYTES) == 0) {
        channel->header = partial;
        channel->chunk = channel->partials_in / member->nodes_size;
        channel->node = member->nodes[channel->partials_in++ % member->nodes_size];
    } else if (member->progress_in != NULL && memcmp(channel->tail, member->progress_in, LANE_HEADER_BYTES) == 0) {
        channel->header = member->progress_in;
        channel->chunk = PROGRESS;
        channel->node = NONE;
        channel->payload = (char *)channel->tail; /* nothing of it is read */
        channel->payload_bytes = channel->payload_have = 0;
        channel->tail_have = 0;
        channel->tail_want = lane->plan.tag_bytes + LANE_HEADER_BYTES; /* it comes before something else */
        return 0;
    } else {
        return lane_fail(lane, channel, LANE_UNEXPECTED, 0);
    }
    int is_last = channel->results_in == channel->results_size && channel->partials_in == channel->partials_size;
    channel->tail_have = 0;
    /* What follows the last frame belongs to the next exchange. */
    channel->tail_want = lane->plan.tag_bytes + (is_last ? 0 : LANE_HEADER_BYTES);
    lane_resume(lane, channel);
    return 0;
}

/* The payload and its tag are here: verify them. */
static int complete(struct lane *lane, struct channel *channel) {
    size_t tag_bytes = lane->plan.tag_bytes;
    uint8_t wanted[LANE_MOST_TAG_BYTES];
    if (lane_tag(lane, channel->number, 1, channel->header, channel->payload, channel->payload_bytes, wanted))
        return -1;
    uint8_t differs = 0;
    for (size_t i = 0; i < tag_bytes; i++)
        differs |= wanted[i] ^ channel->tail[i]; /* in constant time: it may be a MAC */
    if (differs)
        return lane_fail(lane, channel, LANE_DAMAGED, 0);
    if (channel->node != NONE)
        lane->missing[channel->chunk]--;
    channel->chunk = NONE;
    channel->tail_have -= tag_bytes;
    channel->tail_want -= tag_bytes;
    memmove(channel->tail, channel->tail + tag_bytes, channel->tail_have);
    return 0;
}

long lane_receive(struct lane *lane, struct channel *channel) {
    if (channel->paused) /* polled for nothing else */
        return lane_fail(lane, channel, LANE_CLOSED, 0);
    long taken = 0;
    for (int is_complete = 0; !is_complete && channel->tail_want > 0;) {
        size_t rest = channel->chunk == NONE ? 0 : channel->payload_bytes - channel->payload_have;
        int moves = channel->chunk != PROGRESS || lane->plan.heeds_progress;
        struct iovec parts[2] = {
            {channel->payload + channel->payload_have, rest},
            {channel->tail + channel->tail_have, channel->tail_want - channel->tail_have},
        };
        struct msghdr message = {.msg_iov = rest ? parts : parts + 1, .msg_iovlen = rest ? 2 : 1};
        ssize_t count = recvmsg(channel->member->fd, &message, MSG_DONTWAIT);
        if (count < 0)
            return errno == EAGAIN || errno == EINTR ? taken : lane_fail(lane, channel, LANE_ERROR, errno);
        if (count == 0)
            return lane_fail(lane, channel, LANE_CLOSED, 0);
        taken += moves ? count : 0;
        size_t of_payload = (size_t)count < rest ? (size_t)count : rest;
        channel->payload_have += of_payload;
        channel->tail_have += (size_t)count - of_payload;
        if (channel->chunk != NONE && channel->tail_have >= lane->plan.tag_bytes) {
            if (complete(lane, channel))
                return -1;
            is_complete = 1; /* let others have a turn */
        }
        if (channel->chunk == NONE && channel->tail_have == LANE_HEADER_BYTES) {
            if (begin(lane, channel))
                return -1;
            if (channel->chunk == PROGRESS && !lane->plan.heeds_progress)
                taken = taken > LANE_HEADER_BYTES ? taken - LANE_HEADER_BYTES : 0;
            if (channel->paused)
                return taken;
        }
    }
    return taken;
}

/* AES-256-GMAC of a frame, the twin of `Macs` in _seals.py: compiled once for each set of instructions for AES and for
 * carry-less products; LANE_MAC is its name.
 *
 * It is the tag of GCM (NIST SP 800-38D) with the sequence number as nonce, the payload as associated data, and the
 * header as plaintext:  E(1) + X1 H^n + X2 H^(n-1) + ... + Xn H  in GF(2^128), where E(i) is the encrypted counter
 * block i, H the encrypted zero, + is XOR, and the X are the blocks of the payload, of the header's ciphertext, and of
 * the lengths. No branch and no address depends on a key, so time does not show it. That is why there is no version for
 * other processors: AES by tables shows its key in the times of the cache.
 *
 * A block, with its bytes reversed, is an integer whose bit 127 - i is the coefficient of x^i. The carry-less product
 * of two of them is that of the polynomials times x (Gueron and Kounavis, "Intel Carry-Less Multiplication Instruction
 * and its Usage for Computing the GCM Mode"), so the powers of H are kept divided by x. As in that paper, the products
 * of several blocks, here of a stripe, are added before they are reduced, and three products make one of twice the
 * size (Karatsuba). */
#include "lane.h"

#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define BLOCK 16
#define HEADER_BLOCKS (LANE_HEADER_BYTES / BLOCK)
#define ROUNDS 14

/* ---- the instructions: of one block, and of a vector of LANES blocks ---- */

#ifdef __x86_64__
#include <immintrin.h>
typedef __m128i block;

INLINE block load(const void *at) { return _mm_loadu_si128(at); }
INLINE void store(void *at, block a) { _mm_storeu_si128(at, a); }
INLINE block zero(void) { return _mm_setzero_si128(); }
INLINE block add(block a, block b) { return _mm_xor_si128(a, b); }
INLINE block swapped(block a) { return _mm_shuffle_epi32(a, 0x4e); } /* of 8 bytes */
INLINE block upward(block a) { return _mm_slli_si128(a, 8); }
INLINE block downward(block a) { return _mm_srli_si128(a, 8); }
INLINE block order(void) { return _mm_set_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }
INLINE block reversed(block a) { return _mm_shuffle_epi8(a, order()); }
/* The products of the low halves, of the high halves, and of the sums of both halves. */
INLINE block low(block a, block b) { return _mm_clmulepi64_si128(a, b, 0x00); }
INLINE block high(block a, block b) { return _mm_clmulepi64_si128(a, b, 0x11); }
INLINE block sums(block a, block b) { return low(add(a, swapped(a)), add(b, swapped(b))); }

INLINE uint32_t substituted(uint32_t word) {
    return (uint32_t)_mm_cvtsi128_si32(_mm_aeskeygenassist_si128(_mm_set1_epi32((int)word), 0));
}

INLINE block encrypted(const struct lane_mac *mac, block a) {
    a = add(a, load(mac->round_keys[0]));
    for (int i = 1; i < ROUNDS; i++)
        a = _mm_aesenc_si128(a, load(mac->round_keys[i]));
    return _mm_aesenclast_si128(a, load(mac->round_keys[ROUNDS]));
}

#else
#include <arm_neon.h>
typedef uint64x2_t block;

INLINE block load(const void *at) { return vreinterpretq_u64_u8(vld1q_u8(at)); }
INLINE void store(void *at, block a) { vst1q_u8(at, vreinterpretq_u8_u64(a)); }
INLINE block zero(void) { return vdupq_n_u64(0); }
INLINE block add(block a, block b) { return veorq_u64(a, b); }
INLINE block swapped(block a) { return vextq_u64(a, a, 1); }
INLINE block upward(block a) { return vextq_u64(zero(), a, 1); }
INLINE block downward(block a) { return vextq_u64(a, zero(), 1); }
INLINE block reversed(block a) {
    return swapped(vreinterpretq_u64_u8(vrev64q_u8(vreinterpretq_u8_u64(a))));
}
INLINE block low(block a, block b) {
    return vreinterpretq_u64_p128(vmull_p64((poly64_t)vgetq_lane_u64(a, 0), (poly64_t)vgetq_lane_u64(b, 0)));
}
INLINE block high(block a, block b) {
    return vreinterpretq_u64_p128(vmull_high_p64(vreinterpretq_p64_u64(a), vreinterpretq_p64_u64(b)));
}
INLINE block sums(block a, block b) { return low(add(a, swapped(a)), add(b, swapped(b))); }

INLINE uint32_t substituted(uint32_t word) { /* of four equal columns, which the shift of rows does not change */
    uint8x16_t all = vaeseq_u8(vreinterpretq_u8_u32(vdupq_n_u32(word)), vdupq_n_u8(0));
    return vgetq_lane_u32(vreinterpretq_u32_u8(all), 0);
}

INLINE block encrypted(const struct lane_mac *mac, block a) {
    uint8x16_t state = vreinterpretq_u8_u64(a);
    for (int i = 0; i < ROUNDS - 1; i++)
        state = vaesmcq_u8(vaeseq_u8(state, vld1q_u8(mac->round_keys[i])));
    state = vaeseq_u8(state, vld1q_u8(mac->round_keys[ROUNDS - 1]));
    return add(vreinterpretq_u64_u8(state), load(mac->round_keys[ROUNDS]));
}
#endif

#ifdef __VPCLMULQDQ__
#define LANES 4
typedef __m512i vector;

INLINE vector load_powers(const void *at) { return _mm512_loadu_si512(at); }
INLINE vector load_blocks(const void *at) {
    return _mm512_shuffle_epi8(_mm512_loadu_si512(at), _mm512_broadcast_i32x4(order()));
}
INLINE vector add_first(vector a, block b) { return _mm512_xor_si512(a, _mm512_zextsi128_si512(b)); }
INLINE vector add_all(vector a, vector b) { return _mm512_xor_si512(a, b); }
INLINE vector low_all(vector a, vector b) { return _mm512_clmulepi64_epi128(a, b, 0x00); }
INLINE vector high_all(vector a, vector b) { return _mm512_clmulepi64_epi128(a, b, 0x11); }
INLINE vector swapped_all(vector a) { return _mm512_shuffle_epi32(a, 0x4e); }
INLINE vector sums_all(vector a, vector b) { return low_all(add_all(a, swapped_all(a)), add_all(b, swapped_all(b))); }
INLINE block total(vector a) {
    __m256i half = _mm256_xor_si256(_mm512_castsi512_si256(a), _mm512_extracti64x4_epi64(a, 1));
    return add(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
}
#else
#define LANES 1
typedef block vector;
#define load_powers load
#define load_blocks(at) reversed(load(at))
#define add_first add
#define add_all add
#define low_all low
#define high_all high
#define sums_all sums
#define total(a) (a)
#endif

/* ---- the field ---- */

#define VECTORS 8 /* of a stripe. Measured: 16 and 32 are not faster */
#define POWERS (VECTORS * LANES)
_Static_assert(POWERS <= LANE_MOST_POWERS, "there is no room for the powers");

/* Reduce a product of 256 bits by x^128 = x^7 + x^2 + x + 1: the lowest 64 bits, which are the highest powers, first,
 * and then the next. The constant is (x^7 + x^2 + x) / x, reversed; the 1 is the swapped half. */
INLINE block reduced(block lowest, block middle, block highest) {
    const uint64_t poly[2] = {0xc200000000000000u, 0};
    middle = add(middle, add(lowest, highest));
    lowest = add(lowest, upward(middle));
    highest = add(highest, downward(middle));
    block once = add(swapped(lowest), low(lowest, load(poly)));
    return add(add(highest, swapped(once)), low(once, load(poly)));
}

INLINE block product(block a, block b) { return reduced(low(a, b), sums(a, b), high(a, b)); }

/* (y + X1) H^n + X2 H^(n-1) + ... + Xn H, of so many vectors of blocks. */
INLINE block absorb(const struct lane_mac *mac, block y, const void *blocks, size_t vectors) {
    const char *at = blocks;
    const uint8_t(*power)[BLOCK] = mac->powers + POWERS - vectors * LANES;
    vector x = add_first(load_blocks(at), y), h = load_powers(power);
    vector lowest = low_all(x, h), middle = sums_all(x, h), highest = high_all(x, h);
    for (size_t i = 1; i < vectors; i++) {
        x = load_blocks(at + i * LANES * BLOCK), h = load_powers(power + i * LANES);
        lowest = add_all(lowest, low_all(x, h));
        middle = add_all(middle, sums_all(x, h));
        highest = add_all(highest, high_all(x, h));
    }
    return reduced(total(lowest), total(middle), total(highest));
}

/* What does not fill a stripe goes first: zeros before the first block change nothing. */
static block hash(const struct lane_mac *mac, const char *at, size_t blocks) {
    block y = zero();
    const size_t odd = blocks % LANES, vectors = blocks / LANES;
    if (odd) {
        uint8_t padded[LANES][BLOCK] = {{0}};
        memcpy(padded[LANES - odd], at, odd * BLOCK);
        y = absorb(mac, y, padded, 1);
        at += odd * BLOCK;
    }
    if (vectors % VECTORS) {
        y = absorb(mac, y, at, vectors % VECTORS);
        at += vectors % VECTORS * LANES * BLOCK;
    }
    for (size_t i = 0; i < vectors / VECTORS; i++, at += POWERS * BLOCK)
        y = absorb(mac, y, at, VECTORS);
    return y;
}

/* ---- what the lane calls ---- */

INLINE void put(uint8_t *at, uint64_t value) { /* most significant byte first */
    value = __builtin_bswap64(value);
    memcpy(at, &value, sizeof value);
}

static void expand(struct lane_mac *mac, const uint8_t *key) {
    uint32_t words[4 * (ROUNDS + 1)];
    memcpy(words, key, LANE_KEY_BYTES);
    for (int i = 8; i < 4 * (ROUNDS + 1); i++) {
        uint32_t word = words[i - 1];
        if (i % 8 == 0)
            word = substituted(word >> 8 | word << 24) ^ 1u << (i / 8 - 1);
        else if (i % 8 == 4)
            word = substituted(word);
        words[i] = words[i - 8] ^ word;
    }
    memcpy(mac->round_keys, words, sizeof mac->round_keys);
    uint64_t h[2]; /* the hash key, divided by x; the carry is x^-1 = x^127 + x^6 + x + 1 */
    store(h, reversed(encrypted(mac, zero())));
    const uint64_t carry = -(h[1] >> 63);
    h[1] = (h[1] << 1 | h[0] >> 63) ^ (carry & 0xc200000000000000u);
    h[0] = h[0] << 1 ^ (carry & 1);
    memcpy(mac->powers[POWERS - 1], h, BLOCK);
    for (int i = 2; i <= POWERS; i++)
        store(mac->powers[POWERS - i],
              product(load(mac->powers[POWERS - i / 2]), load(mac->powers[POWERS - (i - i / 2)])));
}

static void tag(const struct lane_mac *mac, uint64_t count, const uint8_t *header, const void *payload, size_t bytes,
                uint8_t *out) {
    block counters[1 + HEADER_BLOCKS];
    for (int i = 0; i <= HEADER_BLOCKS; i++) {
        uint8_t counter[BLOCK] = {[BLOCK - 1] = (uint8_t)(i + 1)};
        put(counter + 4, count);
        counters[i] = encrypted(mac, load(counter));
    }
    /* The end: zeros, what the payload has left, the header, the lengths. The hash so far is added where it begins. */
    uint8_t end[VECTORS][BLOCK] = {{0}};
    const size_t rest = bytes % BLOCK, begins = VECTORS - 1 - HEADER_BLOCKS - (rest != 0);
    if (rest)
        memcpy(end[begins], (const char *)payload + (bytes - rest), rest);
    for (int i = 0; i < HEADER_BLOCKS; i++)
        store(end[VECTORS - 1 - HEADER_BLOCKS + i], add(counters[1 + i], load(header + i * BLOCK)));
    put(end[VECTORS - 1], 8 * (uint64_t)bytes);
    put(end[VECTORS - 1] + 8, 8 * LANE_HEADER_BYTES);
    block before = reversed(hash(mac, payload, bytes / BLOCK));
    store(end[begins], add(load(end[begins]), before));
    store(out, add(counters[0], reversed(absorb(mac, zero(), end, VECTORS / LANES))));
}

#define JOIN(a, b) a##b
#define TABLE(name) JOIN(lane_macs_, name)
#define QUOTED(name) #name
#define NAME(name) QUOTED(name)

const struct lane_macs TABLE(LANE_MAC) = {NAME(LANE_MAC), expand, tag};

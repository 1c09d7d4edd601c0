/* Which instructions this processor has: it chooses among the versions of arithmetic.c and mac.c. */
#include "lane.h"

#include <string.h>

static const struct lane_arithmetic *arithmetic;
static const struct lane_macs *macs;

#ifdef __x86_64__
static const struct lane_macs *macs_for(const char *set) {
    if (!__builtin_cpu_supports("aes") || !__builtin_cpu_supports("pclmul") || !__builtin_cpu_supports("ssse3"))
        return NULL;
    return strcmp(set, "avx512") == 0 && __builtin_cpu_supports("vpclmulqdq") ? &lane_macs_vpclmul : &lane_macs_pclmul;
}
#else
#include <sys/auxv.h>
static const struct lane_macs *macs_for(const char *set) {
    (void)set;
    const unsigned long has = getauxval(AT_HWCAP), aes = 1 << 3, pmull = 1 << 4; /* as in Linux's asm/hwcap.h */
    return has & aes && has & pmull ? &lane_macs_pmull : NULL;
}
#endif

EXPORT const char *lane_use(const char *name) {
    const struct lane_arithmetic *found = NULL;
    const char *found_name = NULL;
#define OFFER(set, has)                                                                                        \
    if ((has) && (name == NULL || strcmp(name, #set) == 0)) {                                                  \
        found = lane_arithmetic_##set;                                                                         \
        found_name = #set;                                                                                     \
    }
#ifdef __x86_64__
    __builtin_cpu_init();
#endif
    OFFER(baseline, 1)
#ifdef __x86_64__
    OFFER(avx2, __builtin_cpu_supports("avx2"))
    OFFER(avx512, __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl"))
#endif
    if (found != NULL) {
        arithmetic = found;
        macs = macs_for(found_name);
    }
    return found_name;
}

const struct lane_arithmetic *lane_arithmetic_of(int dtype) { return &arithmetic[dtype]; }
const struct lane_macs *lane_macs_in_use(void) { return macs; }
EXPORT const char *lane_macs_name(void) { return macs == NULL ? NULL : macs->name; }

EXPORT int lane_mac(const uint8_t *key, uint64_t count, const uint8_t *header, const void *payload, size_t bytes,
                    uint8_t *tag) {
    if (macs == NULL)
        return -1;
    struct lane_mac mac;
    macs->expand(&mac, key);
    macs->tag(&mac, count, header, payload, bytes, tag);
    return 0;
}

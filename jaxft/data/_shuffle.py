"""A shuffle that needs no memory: the new position of p is computed from (key, p) alone.

A Feistel network is a bijection for any round function, so every sample of an epoch is used exactly once. It works
on a power of four; a result outside the range is sent through again until it falls inside (cycle-walking), which
keeps it a bijection. A permutation drawn with numpy would take memory for every sample, and numpy guarantees its
bits only within one version.
"""

_ROUNDS = 4  # enough to shuffle (Luby and Rackoff, 1988); not a cipher
_MASK_64 = 2**64 - 1


def permute(position: int, *, size: int, key: int) -> int:
    """Return the new position of `position` in the shuffle of `range(size)` with this key."""
    assert 0 <= position < size
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    # The domain has fewer than 8 * size values, and the cycle of a position inside returns inside.
    while True:
        position = _feistel(position, half_bits, key)
        if position < size:
            return position


def mix(*words: int) -> int:
    """Hash integers into 64 well-mixed bits (the finisher of splitmix64, word by word)."""
    state = 0
    for word in words:
        state = (state ^ word) + 0x9E3779B97F4A7C15 & _MASK_64
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK_64
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK_64
        state ^= state >> 31
    return state


def _feistel(value: int, half_bits: int, key: int) -> int:
    half_mask = (1 << half_bits) - 1
    left, right = value >> half_bits, value & half_mask
    for round_number in range(_ROUNDS):
        left, right = right, left ^ mix(key, round_number, right) & half_mask
    return left << half_bits | right

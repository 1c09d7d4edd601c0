"""A shuffle that needs no memory: the new position of p is computed from (key, p) alone.

A Feistel network is a bijection for any round function, so every sample of an epoch is used exactly once. It works
on a power of four; a result outside the range is sent through again until it falls inside (cycle-walking), which
keeps it a bijection. A permutation drawn with numpy would take memory for every sample, and numpy guarantees its
bits only within one version.
"""

import operator

import numpy as np

_ROUNDS = 4  # enough to shuffle (Luby and Rackoff, 1988); not a cipher
_MASK_64 = 2**64 - 1
# Of splitmix64.
_ADDED, _FACTORS = 0x9E3779B97F4A7C15, (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def permute(position: int, *, size: int, key: int) -> int:
    """Return the new position of `position` in the shuffle of `range(size)` with this key.

    Example:
        >>> from jaxft.data import permute
        >>> sorted(permute(position, size=5, key=7) for position in range(5))
        [0, 1, 2, 3, 4]
    """
    assert 0 <= position < size
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    # The domain has fewer than 8 * size values, and the cycle of a position inside returns inside.
    while True:
        position = _feistel(position, half_bits, key)
        if position < size:
            return position


def permute_all(positions: np.ndarray, *, size: int, key: int) -> np.ndarray:
    """Return `permute` of each of many positions, 20 times as fast.

    Args:
        positions: any integers in `range(size)`, of any shape.
        size: how many there are to shuffle.
        key: as for `permute`.

    Returns:
        int64, of the same shape.
    """
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    rounds = [np.uint64(mix(key, number)) for number in range(_ROUNDS)]
    values = positions.astype(np.uint64)
    outside = np.ones(values.shape, bool)
    while outside.any():
        values[outside] = _feistel_all(values[outside], half_bits, rounds)
        outside = values >= size
    return values.astype(np.int64)


def mix(*words: int) -> int:
    """Hash integers into 64 well-mixed bits (the finisher of splitmix64, word by word).

    Example:
        >>> from jaxft.data import mix
        >>> mix(0, 1) == mix(0, 1), mix(0, 1) == mix(1, 0)
        (True, False)
    """
    state = 0
    for word in words:
        state = (state ^ operator.index(word)) + _ADDED & _MASK_64
        state = (state ^ state >> 30) * _FACTORS[0] & _MASK_64
        state = (state ^ state >> 27) * _FACTORS[1] & _MASK_64
        state ^= state >> 31
    return state


def _feistel(value: int, half_bits: int, key: int) -> int:
    half_mask = (1 << half_bits) - 1
    left, right = value >> half_bits, value & half_mask
    for round_number in range(_ROUNDS):
        left, right = right, left ^ mix(key, round_number, right) & half_mask
    return left << half_bits | right


def _feistel_all(values: np.ndarray, half_bits: int, rounds: list[np.uint64]) -> np.ndarray:
    """`_feistel` of each value; `rounds` are the states of `mix` after the key and each round's number."""
    half_mask, shift = np.uint64((1 << half_bits) - 1), np.uint64(half_bits)
    left, right = values >> shift, values & half_mask
    for state in rounds:
        left, right = right, left ^ _mixed_all(state, right) & half_mask
    return left << shift | right


def _mixed_all(state: np.uint64, words: np.ndarray) -> np.ndarray:
    mixed = (words ^ state) + np.uint64(_ADDED)  # uint64 arithmetic wraps around
    mixed = (mixed ^ mixed >> np.uint64(30)) * np.uint64(_FACTORS[0])
    mixed = (mixed ^ mixed >> np.uint64(27)) * np.uint64(_FACTORS[1])
    return mixed ^ mixed >> np.uint64(31)

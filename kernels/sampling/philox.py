"""Counter-based random numbers, each a pure function of (seed, choice, position).

Philox4x32 with ten rounds (Salmon and others, "Parallel random numbers: as easy as 1, 2, 3", 2011):
the seed is the key, (choice, position, 0, 0) the counter. Nothing is carried from one number to the
next, so a token can be drawn again from its place alone.
"""

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]  # 32-bit words, each in 64 bits so that a product of two fits

NUM_ROUNDS = 10
LOW = np.uint64(0xFFFFFFFF)
HALF = np.uint64(32)
MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], np.uint64)
WEYL = np.array([0x9E3779B9, 0xBB67AE85], np.uint64)  # golden ratio, sqrt(3) - 1


def key_schedule(seeds: list[int]) -> Words:
    """Return the round keys [10, 2, seeds] of 64-bit seeds, signed or not."""
    whole: Words = np.array([seed & 0xFFFFFFFFFFFFFFFF for seed in seeds], np.uint64)
    first = np.stack([whole & LOW, whole >> HALF])
    rounds: Words = np.arange(NUM_ROUNDS, dtype=np.uint64)[:, None, None]
    schedule: Words = (first + rounds * WEYL[:, None]) & LOW
    return schedule


def philox(keys: Words, counters: Words) -> Words:
    """Return four random words [4, n] for each counter [4, n].

    keys [10, 2, n] are those of `key_schedule`.
    """
    even, odd = counters[0::2], counters[1::2]
    for key in keys:
        product = even * MULTIPLIERS
        even, odd = (product >> HALF)[::-1] ^ odd ^ key, (product & LOW)[::-1]
    return np.stack([even[0], odd[0], even[1], odd[1]])


def uniforms(keys: Words, choices: list[int], positions: list[int]) -> NDArray[np.float64]:
    """Return numbers [n] in [0, 1), multiples of 2**-53: one for each key, choice and position."""
    counters = np.zeros((4, len(positions)), np.uint64)
    counters[0], counters[1] = choices, positions
    words = philox(keys, counters)
    high, low = words[0] >> np.uint64(5), words[1] >> np.uint64(6)
    numbers: NDArray[np.float64] = (high * 2.0**26 + low) * 2.0**-53
    return numbers

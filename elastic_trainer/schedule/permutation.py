"""The keyed permutation of range(size), and the hash of whole numbers that all draws rest on.

key, positions → here → order (samples), schedule (seeds)

What always holds:
1. The bits are the same on every machine: only integer operations on 64 bits. A change to one of
   them breaks every run that has a checkpoint, so the tests pin literal values.
2. Memory is O(1) in the size and O(positions) in the answer.

Dear to undo: the permutation is a Feistel network on a rectangle that just covers range(size), with
both sides about sqrt(size). The usual choice is the next power of four. The rectangle exceeds
`size` by less than a row, so almost no position has to walk the cycle again. On the power of four
up to 3/4 of all positions would. A test of randomness that this permutation fails, and a true
shuffle passes, would change our mind.

Source: Black and Rogaway, "Ciphers with Arbitrary Finite Domains" (2002), generalized Feistel and
cycle walking; splitmix64, https://prng.di.unimi.it/splitmix64.c, for the constants of the mix.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]
_SMALL = 2**12
"""A smaller size takes more rounds. With 6 rounds a chi-square test fails up to size 12."""
_ROUNDS_SMALL, _ROUNDS = 12, 6
MASK = 2**64 - 1
_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def _u64(value: int) -> Words:
    # An array without dimensions is faster beside a short array than a scalar.
    return np.array(value, dtype=np.uint64)


_GOLDEN_U64, _MIX_1_U64, _MIX_2_U64 = _u64(_GOLDEN), _u64(_MIX_1), _u64(_MIX_2)
_24, _27, _30, _31, _32 = (_u64(bits) for bits in (24, 27, 30, 31, 32))


def permute(positions: Indices, size: int, key: int) -> Indices:
    """Map positions, shape (n,), to their places in the permutation of range(size) that a 64-bit
    key names.

    Memory is O(n), whatever the size.
    """
    if not positions.size:
        return positions.astype(np.int64)
    assert 0 <= positions.min() and positions.max() < size, f"a position outside range({size})"
    height = math.isqrt(size - 1) + 1
    rows, columns = _u64(height), _u64(-(-size // height))
    round_keys = [_u64(mix(key, i)) for i in range(_ROUNDS_SMALL if size < _SMALL else _ROUNDS)]
    places = _shuffle_rectangle(positions.astype(np.uint64), rows, columns, round_keys)
    while places.max() >= size:
        outside = np.flatnonzero(places >= _u64(size))
        places[outside] = _shuffle_rectangle(places[outside], rows, columns, round_keys)  # walk on
    return places.astype(np.int64)


def mixed(numbers: Indices, key: int = 0) -> Words:
    """Return 64 well mixed bits of each number and a key of 64 bits."""
    x = numbers.astype(np.uint64)
    x ^= _u64(key)
    x += _GOLDEN_U64
    x ^= x >> _30
    x *= _MIX_1_U64
    x ^= x >> _27
    x *= _MIX_2_U64
    x ^= x >> _31
    return x


def _shuffle_rectangle(places: Words, rows: Words, columns: Words,
                       round_keys: list[Words]) -> Words:
    row, column = np.divmod(places, columns)
    for i, round_key in enumerate(round_keys):
        if i % 2 == 0:
            row += _draw(column, round_key)
            row %= rows
        else:
            column += _draw(row, round_key)
            column %= columns
    row *= columns
    row += column
    return row


def _draw(half: Words, round_key: Words) -> Words:
    """Mix one half into 40 bits, to which the modulo of the other half is applied."""
    x = half ^ round_key
    x *= _MIX_1_U64
    x ^= x >> _32
    x *= _MIX_2_U64
    x >>= _24
    return x


def mix(*numbers: int) -> int:
    """Hash whole numbers into 64 bits. Their order matters."""
    x = 0
    for number in numbers:
        x = ((x ^ number) + _GOLDEN) & MASK
        x = ((x ^ (x >> 30)) * _MIX_1) & MASK
        x = ((x ^ (x >> 27)) * _MIX_2) & MASK
        x ^= x >> 31
    return x

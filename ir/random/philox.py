"""Philox of 4 x 64 bits and ten rounds: numbers of 16 bits by key and place.

The cipher is that of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011), the
counters are those of numpy's generator: block b of a key is what the counter b + 1 becomes. Each
block is 16 numbers, lowest bits first. On a CPU numpy makes them, in a kernel Triton: the same.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from threading import local
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numpy.random import Philox
from torch import Tensor

from meshwright.ir.errors import PlanError
from meshwright.ir.launch import jit, tl

PER_BLOCK = 16
"""Numbers of a block."""
LEVELS = 1 << 16
"""Values of a number: from -LEVELS / 2 up."""


def dropped_levels(p: float) -> int:
    """How many of the values, the lowest, mean that an element goes: p to the nearest 2^-16, but
    never all of them."""
    return min(round(p * LEVELS), LEVELS - 1)


def least_kept(p: float) -> int:
    """The least number with which an element stays."""
    return dropped_levels(p) - LEVELS // 2


def kept_scale(p: float) -> float:
    """What elements that stay are multiplied by, so that the mean is as before."""
    return LEVELS / (LEVELS - dropped_levels(p))


class _ThreadGenerator(local):
    """A generator of this thread, with the state that it is given before each draw."""

    def __init__(self) -> None:
        self.generator = Philox(0)
        self.state: Any = self.generator.state
        self.state["state"]["key"][:] = 0


_OWN = _ThreadGenerator()


def numbers(key: int, first: int, count: int) -> Tensor:
    """`count` numbers [count] of int16 on the CPU, from the place `first` on; 0 <= key < 2^63."""
    return torch.from_numpy(numbers_of_host(key, first, count))


def numbers_of_host(key: int, first: int, count: int) -> npt.NDArray[np.int16]:
    """The same for numpy."""
    block, skipped = divmod(first, PER_BLOCK)
    words = -(-(skipped + count) // 4)
    own, state = _OWN, _OWN.state["state"]
    state["key"][0], state["counter"][:] = key, (block, 0, 0, 0)
    own.generator.state = own.state
    drawn = own.generator.random_raw(words).astype("<u8", copy=False).view(np.int16)
    return drawn[skipped : skipped + count]


def said(key: int, first: int, held: Tensor | None) -> tuple[int, int]:
    """The key and the first place where `held` may say both: see `ir.random.dropout.dropout`."""
    if held is None:
        return key, first
    if held.device.type != "cpu":
        raise PlanError(
            "numbers whose key a device holds are drawn there, and there is no kernel for these"
        )
    key, more = held.tolist()
    return key, first + more


@jit
def block_numbers(key, number, COUNT: tl.constexpr):
    """The numbers of COUNT blocks, which are `number` [COUNT] of int64: [16 COUNT], each as the
    upper half of an int32, below which anything may stand."""
    none = tl.zeros([COUNT], tl.int64)
    one, two, three, four = tl.philox(key, number + 1, none, none, none)
    words = tl.reshape(tl.join(tl.join(one, three), tl.join(two, four)), [COUNT * 4])
    low, high = words.to(tl.uint32), (words >> 32).to(tl.uint32)
    pairs = tl.reshape(tl.join(low, high), [COUNT * 8])
    return tl.reshape(tl.join(pairs << 16, pairs), [COUNT * 16]).to(tl.int32, bitcast=True)


@jit
def numbers_at(key, place, COUNT: tl.constexpr):
    """The same of places [COUNT] of int64, wherever they are: a block is made for each."""
    none = tl.zeros([COUNT], tl.int64)
    one, two, three, four = tl.philox(key, place // 16 + 1, none, none, none)
    word = place % 16 // 4
    found = tl.where(word == 0, one, tl.where(word == 1, two, tl.where(word == 2, three, four)))
    drawn = (found >> (place % 4 * 16).to(tl.uint64)).to(tl.uint32)
    return (drawn << 16).to(tl.int32, bitcast=True)


@jit
def told(key, first):
    """The key and the first place, or where `key` points to a key and to how many places more."""
    if key.dtype.is_ptr():
        first = first + tl.load(key + 1)
        key = tl.load(key)
    return key, first


@jit
def factors_of(drawn, least, WIDE: tl.constexpr):
    """What elements with these numbers, in upper halves, are multiplied by: 0, or from the number
    `least` on the `kept_scale`."""
    kept = (32768 - least).to(WIDE)
    levels = kept * 0.0 + 65536.0
    scale = levels / kept if WIDE == tl.float64 else tl.div_rn(levels, kept)
    return tl.where(drawn >= least * 65536, scale, 0.0).to(WIDE)

"""What a forward and a backward that run together hold at most: each stops where it waits for a
collective, with what it has there, and the other goes on."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from meshwright.costmodel.memory.stage_memory import NOTHING, Bytes, StageMemory


class Stretch(NamedTuple):
    """What an action holds from one stop to the next."""

    most: Bytes
    left: Bytes
    """At its end."""


def pair_rise(ahead: StageMemory, back: StageMemory, *, first: bool, last: bool) -> Bytes:
    """Most within both, beside what is in flight and gradients; what the forward keeps counts as
    it comes, what the backward frees as its blocks end. `first`, `last`: of the backward."""
    lines = [iter(_forward(ahead)), iter(_backward(back, first, last))]
    at = [NOTHING, NOTHING]
    most = NOTHING
    left = [0, 1]
    while left:
        for number in list(left):
            stretch = next(lines[number], None)
            if stretch is None:
                left.remove(number)
                continue
            most = max(most, stretch.most.plus(at[1 - number]), key=lambda held: held.total)
            at[number] = stretch.left
    return most


def _forward(stage: StageMemory) -> Iterator[Stretch]:
    rises = stage.forward_rises()
    most, saved = NOTHING, 0
    for index, block in enumerate(stage.blocks):
        own = [Bytes(*rise) for at, rise in rises if at == index]
        stops = stage.stops[index][0]
        for number in range(stops + 1):
            # What a block saves it makes bit by bit.
            there = block.saved * (number + 1) // (stops + 1) - block.saved
            held = [rise.plus(Bytes(activations=there)) for rise in own[-1:]]
            most = _most([most, *own[:-1], *held])
            if number < stops:
                yield Stretch(most, held[-1])
                most = NOTHING
        saved += block.saved
    yield Stretch(most, Bytes(activations=saved))


def _backward(stage: StageMemory, first: bool, last: bool) -> Iterator[Stretch]:
    rises = stage.backward_rises(first, last)
    most = NOTHING
    freed = Bytes()
    for index in reversed(range(len(stage.blocks))):
        own = [Bytes(*rise) for at, rise in rises if at == index]
        needs = max(own, key=lambda held: held.workspace)
        for _ in range(stage.stops[index][1]):
            yield Stretch(_most([most, *own]), needs)
            most = NOTHING
        most = _most([most, *own])
        gradients, activations, moving, _ = own[-1]
        freed = Bytes(gradients, activations - stage.blocks[index].saved, moving)
    yield Stretch(most, freed)


def _most(several: Sequence[Bytes]) -> Bytes:
    return max(several, key=lambda held: held.total)

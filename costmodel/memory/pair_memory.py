"""What a forward and a backward that run together hold at most: each stops where it waits for a
collective, with what it has there, and the other goes on."""

from collections.abc import Iterator
from typing import NamedTuple

from meshwright.costmodel.memory.stage_memory import NOTHING, Bytes, StageMemory


class Stretch(NamedTuple):
    """What an action holds from one stop to the next."""

    held: list[Bytes]
    left: Bytes
    """At its end."""


def pair_rise(ahead: StageMemory, back: StageMemory, *, first: bool, last: bool) -> Bytes:
    """Most within both, beside what is in flight and gradients; what the forward keeps counts as
    it comes, what the backward frees as its blocks end. `first`, `last`: of the backward."""
    lines = [iter(_forward(ahead)), iter(_backward(back, first, last))]
    at, left = [NOTHING, NOTHING], [0, 1]
    found: list[Bytes] = []
    while left:
        for number in list(left):
            stretch = next(lines[number], None)
            if stretch is None:
                left.remove(number)
                continue
            found += [held.plus(at[1 - number]) for held in stretch.held]
            at[number] = stretch.left
    return max(found, key=lambda held: held.total)


def _forward(stage: StageMemory) -> Iterator[Stretch]:
    rises = stage.forward_rises()
    found, saved = list[Bytes](), 0
    for index, block in enumerate(stage.blocks):
        *gathered, own = [Bytes(*rise) for at, rise in rises if at == index]
        found += gathered
        stops = stage.stops[index].ahead
        for number in range(stops + 1):
            # What a block saves it makes bit by bit.
            there = block.saved * (number + 1) // (stops + 1) - block.saved
            found.append(own.plus(Bytes(activations=there)))
            if number < stops:
                yield Stretch(found, found[-1])
                found = []
        saved += block.saved
    # What it sends goes when both are over.
    yield Stretch(found, Bytes(activations=saved, communication=stage.sent))


def _backward(stage: StageMemory, first: bool, last: bool) -> Iterator[Stretch]:
    rises = stage.backward_rises(first, last)
    found, freed = list[Bytes](), NOTHING
    for index in reversed(range(len(stage.blocks))):
        block = stage.blocks[index]
        again, back = stage.stops[index].again, stage.stops[index].back
        # It may stop before what it has made again begins to go, with gradients that are to come.
        late = block.late * block.remakes
        stopped = (max(0, block.one_op - block.workspace) + late) * bool(again + back)
        own = [Bytes(*rise).plus(Bytes(workspace=stopped)) for at, rise in rises if at == index]
        needs = max(own, key=lambda held: held.workspace)
        for number in range(again):
            # What is made again comes bit by bit; the last collective is at the block's end, where
            # all of it is there.
            made = needs.workspace * (number + 1) // again - needs.workspace
            yield Stretch([*found, needs.plus(Bytes(workspace=made))],
                          needs.plus(Bytes(workspace=made)))  # fmt: skip
            found = []
        for _ in range(back):
            yield Stretch([*found, *own], needs)
            found = []
        found += own
        gradients, activations, moving, _ = own[-1]
        freed = Bytes(gradients, activations - stage.blocks[index].saved, moving)
    # The gradient that it sends back goes when both are over.
    yield Stretch(found, freed.plus(Bytes(communication=stage.entry_back)))

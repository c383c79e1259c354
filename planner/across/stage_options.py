"""Ways to run stages on a group of devices: how much of the activations is saved, for how long."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.forms.retention import AGAIN
from meshwright.planner.across.spans import Matrix
from meshwright.planner.across.treatments import Treatments
from meshwright.planner.problem.space import Mesh

Runs = NDArray[np.int64]
"""Numbers of kinds of runs."""


class Figures(NamedTuple):
    """What stages need: arrays over [mesh, kind of run]."""

    path_s: Matrix
    """One micro-batch through the stage and back, with messages both ways."""
    load_s: Matrix
    """What the stage adds to a step per micro-batch but the first, and once per step."""
    busy_s: Matrix
    """Forward and backward of one micro-batch."""
    static_bytes: Matrix
    flight_bytes: Matrix
    """Memory besides, per micro-batch in flight."""
    workspace_bytes: Matrix
    """Of the static bytes: what the largest block works with."""

    def held(self, in_flight: int) -> Matrix:
        found: Matrix = self.static_bytes + in_flight * self.flight_bytes
        return found

    def of(self, runs: Runs) -> "Figures":
        """Of some kinds of runs."""
        return Figures(*[figure[:, runs] for figure in self])


class _Ladder(NamedTuple):
    """Steps on which less and less is kept: arrays over [step, mesh and kind of run]."""

    static_bytes: Matrix
    flight_bytes: Matrix
    beside_bytes: Matrix
    """That the workspace of the next step takes more, while only some blocks are on it."""
    seconds: Matrix
    """Path, load and busy: [step, mesh and kind of run, 3]."""


@dataclass(frozen=True)
class StageOptions:
    """All ways to run a stage on a group of devices."""

    meshes: tuple[Mesh, ...]
    keep: Figures
    """Where all activations are kept."""
    more: Callable[[], tuple[Figures, ...]]
    """Where more and more is saved, to as much as can be; made when first asked for."""
    layers: Matrix
    """Blocks of each kind of run that can be treated."""
    modes: tuple[bool, ...]
    """Whether recomputing nothing, and something, is allowed: False, True or both."""

    def few(self, runs: Runs) -> "Few":
        """Of some kinds of runs."""
        some = StageOptions(
            self.meshes, self.keep.of(runs), lambda: tuple(each.of(runs) for each in self.more()),
            self.layers[:, runs], self.modes,
        )  # fmt: skip
        return Few(self, some, runs)

    def fitted(self, in_flight: int, room: float) -> "Fitted":
        """The figures where as little as can be is saved; infinite where it does not fit."""
        share, path, load, busy = self.figures(in_flight, room)
        return Fitted(self, share, path, load, busy, in_flight)

    def figures(self, in_flight: int, room: float) -> Matrix:
        """[4, mesh, kind of run]: the share of what can be saved that is; path, load, busy."""
        return self._fitted(in_flight, room).reshape(4, *self.layers.shape)

    def kept(self) -> "Fitted":
        """The figures where all is kept, in whatever memory that takes."""
        path, load, busy = self.keep[:3]
        return Fitted(self, np.zeros_like(path), path, load, busy, 0)

    def _fitted(self, in_flight: int, room: float) -> Matrix:
        """`figures` with meshes and kinds of runs on one axis."""
        needs, layers = self.keep.held(in_flight).ravel(), self.layers.ravel()
        none = layers == 0
        fits = (needs <= room) & (none | (False in self.modes))
        found: Matrix = np.stack([np.zeros_like(needs), *(f.ravel() for f in self.keep[:3])])
        if fits.all():
            return found
        ladder = self._ladder
        held = ladder.static_bytes + in_flight * ladder.flight_bytes
        part = _parts(held, ladder.beside_bytes, layers, room)
        # The first step on which there is room for as few blocks as it takes.
        good = np.isfinite(part) & ~none
        first, every = good.argmax(axis=0), np.arange(len(layers))
        climbs = good.any(axis=0) & ~fits
        found[:, ~fits & ~climbs] = np.inf
        first, every = first[climbs], every[climbs]
        part = part[first, every]
        less, more = ladder.seconds[first, every], ladder.seconds[first + 1, every]
        found[1:, climbs] = (less + part[:, np.newaxis] * (more - less)).T
        less, more = held[first, every], held[first + 1, every]
        with np.errstate(divide="ignore", invalid="ignore"):
            saved = (needs[every] - less - part * (more - less)) / (needs - held[-1])[every]
        found[0, climbs] = np.clip(np.where(np.isnan(saved), 1.0, saved), 1e-9, 1.0)
        return found

    @cached_property
    def _ladder(self) -> _Ladder:
        steps = (self.keep, *self.more())
        if False not in self.modes:
            steps = (steps[0], steps[-1])
        if len(steps) == 1:  # nothing can be saved, as by a step that saves nothing
            steps = (self.keep, self.keep)

        # One copy of each figure, in the order in which it is read.
        figures = np.array([[figure.ravel() for figure in step] for step in steps])
        workspace = figures[:, 5]
        beside = np.maximum(0.0, workspace[1:] - workspace[:-1])
        seconds = figures[:, :3].transpose(0, 2, 1)
        return _Ladder(figures[:, 3], figures[:, 4], beside, seconds)


@dataclass(frozen=True)
class Few:
    """Options of some kinds of runs alone."""

    every: StageOptions
    some: StageOptions
    runs: Runs

    def fitted(self, in_flight: int, room: float) -> "Fitted":
        """As of `every`; infinite for other runs."""
        found = np.full((4, *self.every.layers.shape), np.inf)
        found[:, :, self.runs] = self.some.figures(in_flight, room)
        share, path, load, busy = found
        return Fitted(self.every, share, path, load, busy, in_flight)


def _parts(held: Matrix, beside_bytes: Matrix, layers: Matrix, room: float) -> Matrix:
    """The least share of the blocks that has to go from each step to the next; infinite where even
    all do not do."""
    most, least = held[:-1] + beside_bytes, held[1:]
    layers = np.maximum(1.0, layers)
    with np.errstate(divide="ignore", invalid="ignore"):
        part = np.ceil((most - room) / (most - least) * layers - 1e-9) / layers
    found: Matrix = np.where(least <= room, np.clip(part, 1 / layers, 1.0), np.inf)
    return found


class Fitted(NamedTuple):
    """Options within the memory of their devices: arrays over [mesh, kind of run]."""

    options: StageOptions
    share: Matrix
    """Of what can be saved: what is."""
    path_s: Matrix
    load_s: Matrix
    busy_s: Matrix
    in_flight: int

    @property
    def least_bytes(self) -> Matrix:
        """Where as much as can be is saved."""
        return (self.options.keep, *self.options.more())[-1].held(self.in_flight)


def steps(
    keep: Figures, layers: Matrix, sets: Treatments, in_mode: Callable[[str], Figures]
) -> tuple[Figures, ...]:
    """As `treatments` climbs: what moves to the host unseen, what is cheap to make again, all."""
    hidden, cheap = sets.usual
    found = []
    start, rest = keep, np.ones_like(keep.path_s)
    full = in_mode(AGAIN) if True in sets.modes or hidden else keep
    if hidden:
        part = np.floor(hidden * layers) / np.maximum(1.0, layers)
        inside, rest = keep.flight_bytes - full.flight_bytes, 1 - part
        two = np.where(part > 0, 2 * inside / np.maximum(1.0, layers), 0.0)
        start = keep._replace(
            static_bytes=keep.static_bytes + two, flight_bytes=keep.flight_bytes - part * inside
        )
        found.append(start)
    if cheap:
        found.append(_beyond(start, keep, in_mode(cheap), rest))
    if True in sets.modes:
        if hidden:
            found.append(_beyond(start, keep, full, rest))
        found.append(full)
    return tuple(found)


def _beyond(start: Figures, keep: Figures, mode: Figures, rest: Matrix) -> Figures:
    """From `start` on, that share of the blocks in a mode."""
    changes = [b - a for a, b in zip(keep, mode, strict=True)]
    scaled = [
        start[i] + change * (rest if i != 3 and i != 5 else 1) for i, change in enumerate(changes)
    ]
    return Figures(*scaled)

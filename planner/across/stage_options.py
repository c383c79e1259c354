"""Ways to run stages on a group of devices: how much of the activations is saved, for how long."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.across.spans import Matrix
from meshwright.planner.across.treatments import Treatments
from meshwright.planner.space import Mesh

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


@dataclass(frozen=True, slots=True)
class Options:
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

    def fitted(self, in_flight: int, room: float, runs: Runs | None = None) -> "Fitted":
        """The figures where as little as can be is saved; infinite where it does not fit, and for
        other runs than those asked for."""
        if runs is None:
            return self._fitted(in_flight, room)
        few = Options(
            self.meshes, self.keep.of(runs), lambda: tuple(each.of(runs) for each in self.more()),
            self.layers[:, runs], self.modes,
        )  # fmt: skip
        found = few._fitted(in_flight, room)
        spread = []
        for part in found[1:5]:
            whole = np.full(self.layers.shape, np.inf)
            whole[:, runs] = part
            spread.append(whole)
        share, path, load, busy = spread
        return Fitted(self, share, path, load, busy, in_flight)

    def _fitted(self, in_flight: int, room: float) -> "Fitted":
        needs, none = self.keep.held(in_flight), self.layers == 0
        fits = (needs <= room) & (none | (False in self.modes))
        share = np.where(fits, 0.0, np.inf)
        seconds = [np.where(fits, figure, np.inf) for figure in self.keep[:3]]
        steps = () if fits.all() else (self.keep, *self.more())
        if False not in self.modes and steps:
            steps = (steps[0], steps[-1])
        whole = needs - steps[-1].held(in_flight) if steps else needs
        for less, more in pairwise(steps):
            part = np.where(
                np.isinf(share) & ~none, self._part(less, more, in_flight, room), np.inf
            )
            good = np.isfinite(part)
            part = np.where(good, part, 0.0)
            seconds = [
                np.where(good, a + part * (b - a), s)
                for s, a, b in zip(seconds, less[:3], more[:3], strict=True)
            ]
            a, b = less.held(in_flight), more.held(in_flight)
            with np.errstate(divide="ignore", invalid="ignore"):
                saved = (needs - a - part * (b - a)) / whole
            share = np.where(good, np.clip(np.nan_to_num(saved, nan=1.0), 1e-9, 1.0), share)
        path, load, busy = seconds
        return Fitted(self, share, path, load, busy, in_flight)

    def _part(self, less: Figures, more: Figures, in_flight: int, room: float) -> Matrix:
        """The least share of the blocks between two steps; infinite where even all do not do."""
        beside = np.maximum(0.0, more.workspace_bytes - less.workspace_bytes)
        most, least = less.held(in_flight) + beside, more.held(in_flight)
        layers = np.maximum(1.0, self.layers)
        with np.errstate(divide="ignore", invalid="ignore"):
            part = np.ceil((most - room) / (most - least) * layers - 1e-9) / layers
        found: Matrix = np.where(least <= room, np.clip(part, 1 / layers, 1.0), np.inf)
        return found


class Fitted(NamedTuple):
    """Options within the memory of their devices: arrays over [mesh, kind of run]."""

    options: Options
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
    full = in_mode("full") if True in sets.modes or hidden else keep
    if hidden:
        part = np.floor(hidden * layers) / np.maximum(1.0, layers)
        inside, rest = keep.flight_bytes - full.flight_bytes, 1 - part
        two = np.where(part > 0, 2 * inside / np.maximum(1.0, layers), 0.0)
        start = keep._replace(
            static_bytes=keep.static_bytes + two, flight_bytes=keep.flight_bytes - part * inside
        )
        found.append(start)
    if cheap:
        found.append(_beyond(start, keep, in_mode("selective"), rest))
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

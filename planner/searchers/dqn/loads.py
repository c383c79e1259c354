"""What stages take and hold, by estimate: sums over arrays of blocks, kept once made."""

from collections.abc import Sequence
from functools import cache
from math import ceil
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.costmodel.block.block import BlockCost
from meshwright.costmodel.cost_cache import BlockSpot
from meshwright.costmodel.memory.memory import training_state
from meshwright.forms.exchange import Exchange
from meshwright.forms.retention import AGAIN, KEEP, offered
from meshwright.ir.plan.plan import ModelMesh
from meshwright.planner.across.run_costs import At, RunCosts
from meshwright.planner.across.spans import Matrix, sums_of_named
from meshwright.planner.problem.candidates import StageChoice
from meshwright.planner.problem.space import mesh_of

MODES = (KEEP, AGAIN, *offered())
Codes = NDArray[np.int64]


class StageLoad(NamedTuple):
    """A stage by estimate."""

    busy_s: float
    """All micro-batches."""
    sync_s: float
    state: float
    """Parameters, gradients and optimizer, of the room."""
    memory: float
    """All that is kept, of the room."""

    @property
    def cost_s(self) -> float:
        return (self.busy_s + self.sync_s) * (1 + 4 * max(0.0, self.memory - 1))


class Loads:
    """Of one problem."""

    def __init__(self, runs: RunCosts) -> None:
        self.runs, self.problem = runs, runs.problem
        blocks = runs.blocks
        self._named: dict[str, list[int]] = {}
        """Blocks by name and by pattern."""
        for number, block in enumerate(blocks):
            for name in {block.name, block.pattern}:
                self._named.setdefault(name, []).append(number)
        self._alike = [
            [i for i, kind in enumerate(runs.kinds) if kind == own] for own in runs.kinds
        ]
        self.of = cache(self._of)
        self._room = cache(self.problem.room_bytes)
        self._ats = cache(self._places)
        self._rate = cache(self._slowest)
        self._codes = cache(self._treatment)
        self._table = cache(self._whole)
        self._sizes: dict[tuple[ModelMesh, str], tuple[Matrix, Matrix]] = {}
        """Bytes of runs of blocks, trained and not, by mesh and layouts."""
        self._state = cache(self._held_bytes)

    def _of(self, stage: StageChoice, count: int, in_flight: int) -> StageLoad:
        """Of a stage that holds so many micro-batches."""
        samples = ceil(self.problem.batch / count / stage.dp)
        exchange = self._exchange(stage)
        own = stage.dp_shard if exchange.apart else 0
        ats = self._ats(stage.devices, stage.dp, stage.model, stage.variant, samples, own)
        codes = self._codes(stage.recompute, stage.saved)
        sums = [self._sums(at, stage.start, stage.stop, codes) for at in ats]
        stored, frozen = self._stored(stage)
        size = len(stage.devices) // stage.dp
        rate = self._rate(stage.devices[::size]) if stage.dp > 1 else np.inf
        sync_s = 2 * (stage.dp - 1) / stage.dp * stored / rate
        sync_s *= 1 + count * len(exchange.fetches) / 4
        room = max(self._room(stage.devices), 1)
        held = self._state(stored, frozen, exchange, stage.dp_shard)
        saved = sums[0][1] * in_flight
        busy_s = count * max(busy for busy, _ in sums)
        return StageLoad(busy_s, float(sync_s), held / room, (held + saved) / room)

    def state(self, stage: StageChoice) -> float:
        """`StageLoad.state`, which does not depend on micro-batches."""
        held = self._state(*self._stored(stage), self._exchange(stage), stage.dp_shard)
        return held / max(self._room(stage.devices), 1)

    def _exchange(self, stage: StageChoice) -> Exchange:
        return mesh_of(self.problem, stage).exchange

    def _stored(self, stage: StageChoice) -> tuple[int, int]:
        """Bytes of a rank's parameters, trained and not; tied ones once."""
        key = stage.model, stage.variant
        if key not in self._sizes:
            (at, *_) = self._ats(stage.devices, stage.dp, *key, 1)
            tables, costs = self.problem.tables, self.runs.block_costs(at)
            held = [
                dict(zip(block.params, cost.param_bytes, strict=True))
                for block, cost in zip(self.runs.blocks, costs, strict=True)
            ]
            trained, frozen = (
                sums_of_named([{n: b for n, b in own.items() if n in names} for own in held])
                for names in (tables.trained, tables.frozen)
            )
            self._sizes[key] = trained, frozen
        trained, frozen = self._sizes[key]
        return int(trained[stage.start, stage.stop]), int(frozen[stage.start, stage.stop])

    def _held_bytes(self, trained: int, frozen: int, exchange: Exchange, dp_shard: int) -> int:
        found = training_state(
            trained + frozen, trained, optimizer=self.problem.optimizer, exchange=exchange,
            dp_shard=dp_shard, frozen_bytes=frozen,
        )  # fmt: skip
        return found.parameters_bytes + found.gradients_bytes + found.optimizer_bytes

    def _slowest(self, ranks: tuple[int, ...]) -> float:
        return self.problem.cluster.tier(ranks).rate

    def _places(
        self, devices: tuple[int, ...], dp: int, model: ModelMesh, variant: str, samples: int,
        own: int = 0,
    ) -> tuple[At, ...]:  # fmt: skip
        """One for each type of device; that of the first rank first. `own`: ranks of a replica that
        trains alone that have samples; 0: none does."""
        tables, size = self.problem.tables, len(devices) // dp
        levels = tables.model_levels(devices[:size], model)
        dp_levels = tables.levels(devices[::size])
        own_levels = tables.levels(devices[::size][:own]) if own else None
        names = dict.fromkeys(tables.device_names[rank] for rank in devices)
        return tuple(
            self.runs.canonical(At(spot, variant))
            for name in names
            for spot in [
                BlockSpot(samples, dp, model, name, dp_levels, levels, own_levels=own_levels)
            ]
        )

    # Blocks ---------------------------------------------------------------------------------------

    def _treatment(self, recompute: tuple[str, ...], saved: tuple[tuple[str, str], ...]) -> Codes:
        """Per block, the number of what becomes of its activations."""
        codes = np.zeros(len(self.runs.blocks), np.int64)
        # Names of blocks come before patterns, and recomputing before all else.
        for name, mode in sorted(saved, key=lambda item: -len(self._named.get(item[0], ()))):
            codes[self._named.get(name, [])] = MODES.index(mode)
        for name in recompute:
            codes[self._named.get(name, [])] = MODES.index(AGAIN)
        return codes

    def _sums(self, at: At, start: int, stop: int, codes: Codes) -> tuple[float, float]:
        """Seconds and kept bytes of a micro-batch."""
        table, blocks, used = self._table(at), np.arange(start, stop), codes[start:stop]
        if np.isnan(table[used, blocks, 0]).any():
            self._fill(at, table, blocks, used)
        busy, saved = table[used, blocks].sum(axis=0)
        return float(busy), float(saved)

    def _whole(self, at: At) -> Matrix:
        """[mode, block, seconds and bytes]; not a number where it was not asked for yet."""
        costs = self.runs.block_costs(at)
        table = np.full((len(MODES), len(costs), 2), np.nan)
        table[0] = _rows(costs)
        table[1] = _rows([cost.recomputed() for cost in costs])
        return table

    def _fill(self, at: At, table: Matrix, blocks: Codes, used: Codes) -> None:
        for number, code in zip(blocks, used, strict=True):
            if np.isnan(table[code, number, 0]):
                block = self.runs.blocks[number]
                cost = self.runs.under(block, at, MODES[code])
                table[code, self._alike[number]] = _rows([cost])


def _rows(costs: Sequence[BlockCost]) -> Matrix:
    return np.array([
        (c.forward_s + c.backward_s - c.accumulate_s,
         c.saved_bytes + sum(c.saved_inputs) + sum(c.saved_outputs))
        for c in costs
    ], dtype=float)  # fmt: skip

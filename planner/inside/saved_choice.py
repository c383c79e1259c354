"""Which values of a block are made again: the least seconds for so many bytes, where that is proven
within a fixed number of dead ends; else the best way found by then.

What a maker makes is kept, or it runs again. Then it needs what it reads: of makers that run again
too, or held for it. So the bytes are those of what is kept and of what is held only for others; the
seconds are those of all that runs again.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ortools.sat.python import cp_model

from meshwright.costmodel.block.keeping import Makers, Storage
from meshwright.ir.errors import MeshwrightError
from meshwright.ir.graph.graph import Kind
from meshwright.ir.plan.keeping import operands_key

_CONFLICTS = 10**5
"""Dead ends that the solver may meet; blocks need a few hundred."""


@dataclass(frozen=True, slots=True)
class MakerSet:
    """A set of makers that run again."""

    keys: tuple[str, ...]
    again_s: float
    kept_bytes: int
    """Inside the block, with what is held for them."""


@dataclass(frozen=True)
class SavedChoice:
    """The choice in one block; all that it may ask for."""

    makers: Makers

    @cached_property
    def saved_bytes(self) -> Mapping[str, int]:
        """Maker -> bytes that the backward needs of it."""
        found: dict[str, int] = {}
        for key, nbytes in self.makers.walk.saved.items():
            if maker := self.makers.maker(key):
                found[maker] = found.get(maker, 0) + nbytes
        return found

    def fastest(self, kept_bytes: int) -> MakerSet | None:
        """The least seconds with so many bytes inside the block; None if that is impossible."""
        model = _SavedModel(self)
        model.add_limit(kept_bytes)
        return model.solve(model.seconds())

    def smallest(self, again_s: float) -> MakerSet:
        """The fewest bytes for so many seconds."""
        model = _SavedModel(self)
        model.cp.add(model.seconds() <= round(again_s * 1e9))
        found = model.solve(model.kept())
        assert found is not None  # nothing runs again
        return found

    def front(self, points: int) -> tuple[MakerSet, ...]:
        """From all kept to all made again, at even steps of bytes; without those that others
        beat."""
        most = sum(self.saved_bytes.values())
        ways: list[MakerSet] = []
        for step in range(points + 1):
            way = self.fastest(most * (points - step) // points)
            if way is not None and (not ways or way.kept_bytes < ways[-1].kept_bytes):
                ways.append(way)
        return tuple(ways)

    def reads(self, maker: str) -> Iterator[Storage]:
        """The memories that a maker reads."""
        walk, parts = self.makers.walk, self.makers.parts
        if maker in parts:
            yield from parts[maker].reads
            return
        for storage, made in self.makers.made.items():
            if made == maker:
                yield walk.stored(storage[0], walk.placed[storage[0]])

    def way(self, keys: Sequence[str]) -> MakerSet:
        """What a set of makers costs and leaves."""
        again = set(keys)
        kept = sum(n for maker, n in self.saved_bytes.items() if maker not in again)
        read = {storage for key in keys for storage in self.reads(key)}
        kept += sum(self.held_bytes(s) for s in read if self.makers.inside(s) not in again)
        return MakerSet(tuple(keys), sum(self.makers.cost_s[key] for key in keys), kept)

    def held_bytes(self, storage: Storage) -> int:
        """Bytes of a memory if it is held only for what runs again; 0 if it is there anyway."""
        walk, (name, target) = self.makers.walk, storage
        is_activation = walk.facts.graph.tensors[name].kind is Kind.ACTIVATION
        if not is_activation or name in walk.facts.prelude_values or storage in self.held:
            return 0
        return walk.nbytes(name, dict(zip(walk.site.axes, target, strict=True)))

    @cached_property
    def held(self) -> frozenset[Storage]:
        """Kept anyway, or staying."""
        walk = self.makers.walk
        kept = {(name, target) for name, dtype, target in walk.saved
                if target and dtype == walk.facts.dtypes[name]}  # fmt: skip
        return frozenset(kept | self.makers.staying)


@dataclass
class _SavedModel:
    choice: SavedChoice
    cp: cp_model.CpModel = field(default_factory=cp_model.CpModel)
    again: dict[str, cp_model.IntVar] = field(default_factory=dict)
    """Maker -> whether it runs again."""
    holds: dict[Storage, cp_model.IntVar] = field(default_factory=dict)

    def __post_init__(self) -> None:
        parts = self.choice.makers.parts
        for key in (*parts, *map(operands_key, parts)):
            if key in parts or key in set(self.choice.makers.made.values()):
                self.again[key] = self.cp.new_bool_var(key)
        for key, runs in self.again.items():
            for storage in dict.fromkeys(self.choice.reads(key)):
                self._needs(runs, storage)

    def _needs(self, runs: cp_model.IntVar, storage: Storage) -> None:
        maker = self.choice.makers.inside(storage)
        if not self.choice.held_bytes(storage):
            return
        if storage not in self.holds:
            self.holds[storage] = self.cp.new_bool_var(str(storage[0]))
        made = self.again[maker] if maker else 0
        self.cp.add(self.holds[storage] >= runs - made)

    def seconds(self) -> cp_model.LinearExpr:
        """In nanoseconds; of equal ones, those with the fewest makers."""
        cost = self.choice.makers.cost_s
        terms = [(round(cost[key] * 1e9) + 1) * runs for key, runs in self.again.items()]
        return cp_model.LinearExpr.sum(terms)

    def kept(self) -> cp_model.LinearExpr:
        saved = self.choice.saved_bytes
        terms = [nbytes * (1 - self.again[key]) for key, nbytes in saved.items()]
        terms += [self.choice.held_bytes(s) * held for s, held in self.holds.items()]
        return cp_model.LinearExpr.sum(terms)

    def add_limit(self, kept_bytes: int) -> None:
        self.cp.add(self.kept() <= kept_bytes)

    def solve(self, least: cp_model.LinearExpr) -> MakerSet | None:
        self.cp.minimize(least)
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = 0
        solver.parameters.max_number_of_conflicts = _CONFLICTS
        status = solver.solve(self.cp)
        if status == cp_model.INFEASIBLE:
            return None
        # A block of a thousand ops may not be proven within the limit: the best so far serves too.
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            raise MeshwrightError(
                f"what to keep of a block was not solved: {solver.status_name(status)}"
            )
        return self.choice.way([key for key, runs in self.again.items() if solver.value(runs)])

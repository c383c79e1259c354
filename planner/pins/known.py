"""All decisions that are pinned by name: sizes of mesh axes, and files of `planner/decisions`."""

from collections.abc import Iterator, Mapping
from functools import cache, cached_property, partial

from meshwright.ir.errors import PlanError
from meshwright.ir.extensions import Files
from meshwright.ir.plan.plan import MODEL_AXES, Plan, Stage
from meshwright.planner import decisions
from meshwright.planner.pins.decision import Decision, Machinery

_AXES = ("dp_replicate", "dp_shard", *MODEL_AXES)
_FILES = Files(decisions, "pin")


def _size(axis: str, plan: Plan, stage: Stage) -> int:
    return stage.mesh.get(axis, 1)


class _Decisions(Mapping[str, Decision]):
    """Name -> record. The files are read when the first is asked for, as they may import what reads
    pins."""

    @cached_property
    def _found(self) -> dict[str, Decision]:
        found = {axis: Decision(read=partial(_size, axis)) for axis in _AXES}
        for name in _FILES.names:
            if name in found:
                raise PlanError(f"a pin cannot be called {name!r}: that is an axis of meshes")
            found[name] = _FILES.load(name).DECISION
        return found

    def __getitem__(self, name: str) -> Decision:
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)


DECISIONS = _Decisions()


@cache
def by_hand() -> tuple[str, ...]:
    """Return those that a plan by hand may name as keys."""
    return tuple(name for name, found in DECISIONS.items() if found.scope != "blocks")


@cache
def in_order() -> tuple[Decision, ...]:
    """Return all of them as they are said one after the other."""
    named = sorted(DECISIONS.items(), key=lambda item: (item[1].place, item[0]))
    return tuple(found for _, found in named)


@cache
def machinery() -> tuple[Machinery, ...]:
    """Return what plans that tie are compared by, first what counts first."""
    return tuple(sorted((d.machinery for d in in_order() if d.machinery), key=lambda one: one.rank))

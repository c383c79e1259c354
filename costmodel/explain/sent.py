"""What a run sent beside what its plan said it would: bytes by stage, purpose, form and axis."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import NamedTuple

from meshwright.costmodel.comm.volume import sent_bytes
from meshwright.ir.layout.conversions import Primitive
from meshwright.ir.layout.op_messages import SHIFT
from meshwright.ir.plan.plan import Plan
from meshwright.ir.profile.measured import CollectiveMeasured, Measured

_PURPOSE = {"blocks": "tensors"}
"""What a run calls otherwise than a plan."""


class SentKind(NamedTuple):
    """Which messages are added up."""

    stage: int
    purpose: str
    form: str
    """Of synchronisation; empty: none."""
    axis: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedBytes:
    """What a rank of a stage sends in a step, on average over its ranks."""

    kind: SentKind
    link: str
    """The slowest that it crosses, as the plan has it; empty where it says nothing."""
    predicted: float | None
    """None: the plan says nothing of it."""
    counted: float

    @property
    def error(self) -> float | None:
        """Relative: 0.1 means that more was predicted, by a tenth."""
        return None if self.predicted is None or not self.counted else (
            self.predicted / self.counted - 1
        )  # fmt: skip


def compared_bytes(plan: Plan, runs: Sequence[Measured]) -> tuple[ComparedBytes, ...]:
    """Returns the collectives of stages, most bytes first; none of a plan without detail.

    Counted is from the sizes of a run's collectives: in a ring, and between all as if each rank's
    own part were as large as the others'. Messages between stages, and sums of parameters that
    several stages hold, are not collectives of a stage: they are left out.
    """
    said, links = _said(plan)
    counted = _counted(plan, runs) if said else {}
    rows = [
        ComparedBytes(
            kind=kind, link=links.get(kind, ""), predicted=said.get(kind),
            counted=counted.get(kind, 0.0),
        )
        for kind in dict.fromkeys([*said, *counted])
    ]  # fmt: skip
    return tuple(sorted(rows, key=lambda row: (-max(row.counted, row.predicted or 0), row.kind)))


def _said(plan: Plan) -> tuple[Mapping[SentKind, float], Mapping[SentKind, str]]:
    """Bytes, and the slowest link of each kind."""
    detail = plan.predicted.detail if plan.predicted else None
    found: dict[SentKind, float] = defaultdict(float)
    links: dict[SentKind, str] = {}
    for index in range(len(plan.stages)) if detail else ():
        assert detail
        for sent in detail.stage(index).traffic:
            if sent.purpose != "stages":
                kind = SentKind(index, sent.purpose, sent.form, sent.axis)
                found[kind] += sent.nbytes
                links[kind] = sent.link
    return found, links


def _counted(plan: Plan, runs: Sequence[Measured]) -> Mapping[SentKind, float]:
    """Mean over the ranks of a stage."""
    by_rank: dict[SentKind, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for m in runs:
        for c in m.collectives:
            if c.stage >= 0 and c.purpose != "job":
                kind = SentKind(c.stage, _PURPOSE.get(c.purpose, c.purpose), c.form, c.axis)
                by_rank[kind][m.rank] += c.count * _sent(c) / m.detailed_steps
    return {
        kind: mean(own.get(rank, 0.0) for rank in plan.stages[kind.stage].devices)
        for kind, own in by_rank.items()
    }


def _sent(c: CollectiveMeasured) -> float:
    return c.nbytes if c.primitive == SHIFT else (
        sent_bytes(Primitive(c.primitive), c.nbytes, c.size)
    )  # fmt: skip

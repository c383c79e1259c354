"""What can be pinned, as data; each prints the text that it is parsed from."""

from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal

from meshwright.ir.plan.plan import MODEL_AXES
from meshwright.planner.pins.parameter_pins import ParametersAs

Value = int | str
Relation = Literal["=", "<=", ">=", "in"]
STAGE_SIZES = ("dp", "dp_replicate", "dp_shard", "model", *MODEL_AXES)
"""Sizes of a stage; `dp` is replicas in all, `model` the ranks of one replica."""


@dataclass(frozen=True, slots=True)
class Scope:
    """Where a decision is pinned: in every stage, in one, or where some blocks run."""

    stage: int | None = None
    block: str = ""
    """A pattern of block names: `h.*`."""

    def __str__(self) -> str:
        if self.stage is not None:
            return f"stage {self.stage} "
        return f"block {self.block} " if self.block else ""

    def covers(self, stage: int, blocks: tuple[str, ...]) -> bool:
        """Whether a stage with these blocks is meant."""
        if self.stage is not None:
            return stage == self.stage
        return not self.block or any(fnmatchcase(name, self.block) for name in blocks)


EVERYWHERE = Scope()


@dataclass(frozen=True, slots=True)
class Pin:
    """One decision and what it may be: `tp=2`, `stage 0 tp<=4`, `pp in 1,2,4`."""

    name: str
    value: Value | tuple[Value, ...]
    """Several values with `in`."""
    relation: Relation = "="
    scope: Scope = EVERYWHERE
    chosen: Value | None = field(default=None, compare=False, repr=False)
    """What searchers choose for `value`, if that is another one (`Decision.means`)."""
    because: str = field(default="", compare=False, repr=False)
    """Why it is pinned, where the user did not."""

    def __str__(self) -> str:
        if isinstance(self.value, tuple):
            return f"{self.scope}{self.name} in {','.join(map(str, self.value))}"
        return f"{self.scope}{self.name}{self.relation}{self.value}"

    def admits(self, value: Value) -> bool:
        """Whether the decision may have this value."""
        if isinstance(self.value, tuple):
            return value in self.value
        if self.chosen is not None:
            return value == self.chosen
        if self.relation == "=" or isinstance(value, str) or isinstance(self.value, str):
            return value == self.value
        return value <= self.value if self.relation == "<=" else value >= self.value


@dataclass(frozen=True, slots=True)
class OnStage:
    """Blocks that must run in a stage; with `starts`, a block that must be its first."""

    block: str
    """A pattern of block names."""
    stage: int
    starts: bool = False

    def __str__(self) -> str:
        return f"block {self.block} {'starts' if self.starts else 'on'} stage {self.stage}"


@dataclass(frozen=True, slots=True)
class StageDevices:
    """The devices of a stage, in the order of its mesh."""

    stage: int
    devices: tuple[int, ...]

    def __str__(self) -> str:
        return f"stage {self.stage} devices {','.join(map(_run_text, _runs(self.devices)))}"


@dataclass(frozen=True, slots=True)
class StageMesh:
    """The whole mesh of a stage; an axis that is not named has one rank."""

    stage: int
    sizes: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        return f"stage {self.stage} mesh {','.join(f'{axis}={n}' for axis, n in self.sizes)}"

    def pins(self) -> tuple[Pin, ...]:
        """The same as sizes of single axes."""
        given = dict(self.sizes)
        axes = ("dp_replicate", "dp_shard", *MODEL_AXES)
        return tuple(Pin(axis, given.get(axis, 1), scope=Scope(stage=self.stage)) for axis in axes)


@dataclass(frozen=True, slots=True)
class StageShares:
    """Samples of each micro-batch on each replica of a stage."""

    stage: int
    shares: tuple[int, ...]

    def __str__(self) -> str:
        return f"stage {self.stage} shares {','.join(map(str, self.shares))}"


@dataclass(frozen=True, slots=True)
class OnType:
    """Device types that a stage may be on."""

    pin: Pin
    ranks: tuple[int, ...]
    """Devices of those types in the cluster."""

    def __str__(self) -> str:
        return str(self.pin)


@dataclass(frozen=True, slots=True)
class Placed:
    """How parameters lie on a model axis: `place h.*.attn tp=R`."""

    pattern: str
    """Of parameter names, or of modules: then all parameters inside."""
    axis: str
    """`model` stands for all model axes: R on each of them, or split on one at least."""
    placement: str
    """`R`, `S` (split along any dim), `S(1)` (in any sections), or a placement in full."""
    blocks: tuple[str, ...] = field(default=(), compare=False)
    """Names of those that read the parameters; found when checked against a model."""

    def __str__(self) -> str:
        return f"place {self.pattern} {self.axis}={self.placement}"

    def names(self, parameter: str) -> bool:
        """Whether a parameter is meant."""
        return fnmatchcase(parameter, self.pattern) or fnmatchcase(parameter, f"{self.pattern}.*")


@dataclass(frozen=True, slots=True)
class MemoryCap:
    """No rank may need more."""

    nbytes: int

    def __str__(self) -> str:
        return f"memory<={self.nbytes}B"


@dataclass(frozen=True, slots=True)
class StepCap:
    """A step may take no longer."""

    seconds: float

    def __str__(self) -> str:
        return f"step<={self.seconds!r}s"


Constraint = (
    Pin | OnStage | StageDevices | StageMesh | StageShares | OnType | Placed | ParametersAs
    | MemoryCap | StepCap
)  # fmt: skip


def _runs(numbers: tuple[int, ...]) -> list[tuple[int, int]]:
    """First and last of each run of consecutive numbers."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return runs


def _run_text(run: tuple[int, int]) -> str:
    return str(run[0]) if run[0] == run[1] else f"{run[0]}-{run[1]}"

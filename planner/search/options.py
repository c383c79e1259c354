"""What may be asked of a search, beside the model and the clusters."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from meshwright.forms.survival import part_named
from meshwright.forms.tried import Given
from meshwright.forms.updates import USUAL
from meshwright.ir.errors import PlanError
from meshwright.ir.extensions import nearest
from meshwright.ir.profile.profile import Profile
from meshwright.ir.profile.profile_store import load_profile
from meshwright.ir.profile.route_counts import RoutesGiven
from meshwright.ir.profile.row_counts import RowCounts
from meshwright.planner.pins.decisions import Constraint
from meshwright.planner.pins.known import DECISIONS


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """The keyword arguments of `search` and `rank`, as one record."""

    global_batch_size: int | None = None
    """Samples of a step; None: as many as the example has."""
    example_inputs: Any = None
    loss_fn: Callable[..., Any] | None = None
    """Of a model that does not return its loss."""
    optimizer: Given = USUAL
    """By name, or as a job gets it: an optimizer of the model's parameters, several, or what makes
    one. It is tried for what it costs, and the plan tells that."""
    precision: str = ""
    """A file of `ir/precision`; empty: that of a graph, or `bf16`, copies of parameters in bfloat16
    of which the optimizer steps float32 ones. Modules may have others: `bf16, lm_head=fp32`."""
    max_grad_norm: float | None = None
    """Gradients are clipped to this global norm."""
    kernels: str | Sequence[str] | None = None
    """Fused ones to put in where their patterns hold: `auto`, those that the cost model says are
    worth it on the clusters' devices, `all`, `none`, names, or `torch`, those that are its own
    operators. None: those that the style's stack has, which are `auto` for our runtime; a graph
    keeps what it was traced with."""
    style: str = ""
    """The stack to price plans for, a file of `ir/styles` such as `megatron`; empty: our runtime.
    Plans for others are exported, not run."""
    searcher: str = "auto"
    constraints: Sequence[str | Constraint] = ()
    """Pins: `"tp=2"`, `"step<=1.2s"`."""
    allow: Sequence[str] = ()
    """What of plain training plans may change: `delayed`, averages that arrive late."""
    rows: RowCounts | Path | str | None = None
    """How often rows of embedding tables occur (`count_rows`), the file that holds it, or
    `zipf:1.05`, what is assumed; None: gradients of tables go whole."""
    routes: RoutesGiven = None
    """Where tokens of mixtures go (`count_routes`), the file that holds it, or `zipf:0.5`, what is
    assumed; None: they are spread evenly."""
    memory_headroom: float = 0.1
    """The share of each device's memory that a plan leaves free, since predictions of memory are
    off by some percent; 0 fills devices. A pin such as `memory<=60GB` says it instead."""
    objective: str = "throughput"
    """Or `memory`, `cheapest`, `batch`."""
    time_limit_s: float = 60
    """For each cluster; and so long, 30 s at least, for the trace before."""
    seed: int = 0
    progress: bool = True
    profile: Profile | Path | str | None = None
    """What was measured of the clusters' machines, or the file that holds it."""
    tensorboard: Path | str | None = None
    """The folder where a searcher that trains (`dqn`) logs how that goes."""
    survives: str = ""
    """`any node` or `any device`: plans of whose state nothing is there alone, so that a loss takes
    none of it. They are found among a few kinds, without a bound."""
    finalists: int = 1
    """So many plans of each cluster at most, the best one and those that are predicted to take
    little more: which of them is fastest only running them can say (`race`)."""

    def __post_init__(self) -> None:
        if self.time_limit_s <= 0:
            raise PlanError(f"time_limit_s is {self.time_limit_s}; it must be positive, such as 60")
        if not 0 <= self.memory_headroom < 1:
            near = 0.0 if self.memory_headroom < 0 else 0.1
            raise PlanError(
                f"memory_headroom is {self.memory_headroom}; it must be a share of memory, at "
                f"least 0 and less than 1; nearest is {near:g}"
            )
        if self.survives:
            part_named(self.survives)
            if self.objective != "throughput":
                raise PlanError(
                    f"survives={self.survives!r} and objective {self.objective!r}: of plans that "
                    "survive the fastest is searched; nearest is objective 'throughput'"
                )
        if self.finalists < 1:
            raise PlanError(
                f"finalists is {self.finalists}; it must be at least 1, the best plan alone"
            )
        if self.finalists > 1 and self.objective != "throughput":
            raise PlanError(
                f"finalists is {self.finalists} and the objective {self.objective!r}: they are "
                "plans of nearly the same speed, of objective 'throughput'; nearest is finalists=1"
            )

    @classmethod
    def of(cls, given: Self | None, **changes: Any) -> Self:
        """Makes the options of some, if there are any, and of keyword arguments, which go first;
        TypeError with the nearest name for one that does not exist."""
        if given is not None and not isinstance(given, cls):
            raise TypeError(
                f"a search takes its options by name; the third argument is a "
                f"{type(given).__name__}; nearest is example_inputs=..."
            )
        names = [field.name for field in dataclasses.fields(cls)]
        for name in changes:
            if name not in names:
                near = repr(nearest(name, names))
                if name in DECISIONS:
                    near = f"constraints=['{name}={changes[name]}']"
                elif name in ("pin", "pins"):
                    near = "constraints=[...]"
                raise TypeError(f"a search has no argument {name!r}; nearest is {near}")
        return dataclasses.replace(given or cls(), **changes)

    def measured(self) -> Profile | None:
        """Loads the profile, if it is a file."""
        return load_profile(self.profile) if isinstance(self.profile, str | Path) else self.profile

    def log_dir(self, cluster: str, *, several: bool) -> Path | None:
        """The folder of logs; each of several clusters has its own."""
        if self.tensorboard is None:
            return None
        return Path(self.tensorboard) / cluster if several else Path(self.tensorboard)

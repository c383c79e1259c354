"""What a plan says of itself: what it is expected to cost, and how it was found."""

from dataclasses import field

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from meshwright.ir.plan.detail import Detail
from meshwright.ir.text.many import Many

_strict = ConfigDict(extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


@dataclass(frozen=True, config=_strict, kw_only=True)
class RankMemory:
    """Predicted peak of the worst rank of a stage's device group, by category."""

    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    communication_bytes: int
    workspace_bytes: int
    inputs_bytes: int = 0
    """The batch."""
    fragmentation_bytes: int = 0
    """What the allocator holds beyond the tensors."""
    late_copies_bytes: int = 0
    """By which tensors may be more where copies to the host end as late as a job lets them, and not
    when the plan's times say so. It must fit, too."""
    process_bytes: int = 0
    """The process and its libraries and communicators; on CPU also the user's own module. 0 where
    that was not measured."""
    host_bytes: int = 0
    """Of parameters, gradients and optimizer state in the host's memory; no part of the rest, but
    where a CPU's memory is its host's."""

    @property
    def tensor_bytes(self) -> int:
        """All that tensors of the job hold, as far as the plan's times go."""
        state = self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes
        moving = self.activations_bytes + self.communication_bytes + self.workspace_bytes
        return state + moving + self.inputs_bytes

    @property
    def used_bytes(self) -> int:
        """What must fit into the memory that a device has for training."""
        return self.tensor_bytes + self.late_copies_bytes + self.fragmentation_bytes

    @property
    def total_bytes(self) -> int:
        """What the operating system or the driver sees."""
        return self.used_bytes + self.process_bytes


@dataclass(frozen=True, config=_strict, kw_only=True)
class StagePrediction:
    """Predicted figures of one stage for one micro-batch (times) and at its peak (memory)."""

    forward_s: float
    backward_s: float
    send_s: float
    """Moving the stage's outputs of one micro-batch to the next stage."""
    sync_s: float
    """Gradient synchronisation and parameter gathering per step that is not overlapped."""
    optimizer_s: float
    """Of a step, as all ranks take theirs at once: longer where they share cores."""
    memory: RankMemory
    hidden_s: float = 0.0
    """Of messages of a step that go under the next one's first forward, what that hides."""


@dataclass(frozen=True, config=_strict, kw_only=True)
class Breakdown:
    """Where the seconds of a step go on the rank that waits least; they sum to the step."""

    rank: int
    """Pipeline rank."""
    forward_s: float
    backward_s: float
    recompute_s: float
    tensor_s: float
    """Collectives inside blocks."""
    wait_s: float
    """For other stages, and for the slowest rank at the end of the step."""
    gradients_s: float
    """Their synchronisation, where it does not hide behind the backward."""
    gather_s: float
    """Of parameters, where it does not hide."""
    optimizer_s: float
    overhead_s: float
    """The runtime itself, the loss and totals of the batch."""
    offload_s: float = 0.0
    """Copies to the host and back, where they do not hide."""


@dataclass(frozen=True, config=_strict, kw_only=True)
class Prediction:
    """What the plan is expected to cost."""

    step_s: float
    samples_per_s: float
    error_band: float
    """Relative: 0.2 means that the step time is expected within 20 %."""
    source: str
    """Where the numbers come from: measured, fitted, datasheet."""
    stages: Many[StagePrediction]
    breakdown: Breakdown | None = None
    detail: Detail | None = None
    """What reports show; made of the plan that is chosen."""

    @property
    def peak_bytes(self) -> int:
        """What limits of memory apply to, on the worst rank."""
        return max(stage.memory.used_bytes for stage in self.stages)


@dataclass(frozen=True, config=_strict, kw_only=True)
class Alternative:
    """A plan that lost, and why."""

    name: str
    step_s: float
    peak_bytes: int
    why: str


@dataclass(frozen=True, config=_strict, kw_only=True)
class Improvement:
    """A plan that was the best so far when the search found it."""

    candidates: int
    """Judged by then."""
    name: str
    step_s: float
    bound_s: float | None = None
    """What no plan can beat, as far as it was known by then."""


@dataclass(frozen=True, config=_strict, kw_only=True)
class Evidence:
    """How the plan was found."""

    searcher: str
    seed: int
    candidates: int
    infeasible: int
    exhausted: bool
    """True if the whole space was covered, by search or by bounds."""
    pruned: dict[str, int] = field(default_factory=dict)
    """What need not be judged, by the reason: bound, memory, dominance."""
    bound_s: float
    """No plan of the searched space can be faster, by the same cost model; 0 if that is not known,
    as where time was up. `ir.plan.beside.bounded` says of which plans it is."""
    gap: float | None
    """step_s / bound_s - 1; None where no bound is known."""
    alternatives: Many[Alternative] = ()
    improved: Many[Improvement] = ()
    """How the search went."""

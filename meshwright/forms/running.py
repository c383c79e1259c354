"""How a form of synchronisation runs: what it is given, and when it is called."""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.forms.rows_here import RowsHere
from meshwright.ir.comm.collective import Notes
from meshwright.ir.errors import PlanError
from meshwright.ir.graph.param import Param
from meshwright.ir.plan.folded import Fold
from meshwright.ir.plan.plan import Stage

SyncState = Mapping[str, Any]
"""Tensors, and numbers, texts, lists and dicts of them, by name."""
Samples = Mapping[str, Tensor]
"""Inputs of the model by name: what this rank reads of them, of all micro-batches in order, where
the user's batch lies. They may be the user's own tensors, which are another batch's later."""


class LaterStep(Protocol):
    """How parameters are stepped after the optimizer's step, as it was set in that."""

    def __call__(self, parameters: Sequence[Tensor]) -> None:
        """Steps these, whose gradients are set, and scaled as all were."""

    def in_parts(
        self, parameter: Tensor, rows: Tensor, gradient: Tensor
    ) -> Callable[[Tensor], None]:
        """Steps some rows of a parameter that has been stepped before, with their gradients; what
        comes back steps all others, with the gradient of all rows, once that is there. Both are
        scaled as those of the step were."""


@dataclass(frozen=True, eq=False)
class Slot:
    """A parameter of a stage as its blocks read it."""

    param: Param
    whole: nn.Parameter
    """The tensor-parallel local tensor, whole on dp."""
    calls: tuple[int, ...]
    """Indices of the stage's calls that read it, ascending."""
    steps: torch.dtype | None = None
    """Where blocks read a copy: the dtype of what the optimizer steps."""
    sums: torch.dtype | None = None
    """Where blocks read a copy: the dtype in which its gradients are summed."""

    @property
    def is_copy(self) -> bool:
        """Whether the optimizer steps another tensor than blocks read."""
        return self.steps is not None

    @property
    def stepped(self) -> torch.dtype:
        """The dtype of what the optimizer steps."""
        return self.steps or self.whole.dtype

    @property
    def summed(self) -> torch.dtype:
        """The dtype in which gradients are summed, by forms that take copies."""
        return self.sums or self.whole.dtype

    @property
    def stepped_bytes(self) -> int:
        """Of the whole parameter, as the optimizer steps it."""
        return self.whole.numel() * self.stepped.itemsize

    @property
    def owner(self) -> int:
        """The call whose backward is the last to add to its gradient."""
        return self.calls[0]

    @property
    def rows(self) -> int:
        return self.whole.shape[0] if self.whole.ndim else 1


@dataclass(frozen=True, eq=False)
class Held:
    """A parameter as this rank's optimizer holds it: whole, or some rows."""

    param: Param
    stage: int
    tensor: nn.Parameter
    rows: tuple[int, int] | None
    """Rows of the tensor-parallel local tensor; None: all."""
    primary: bool
    """No other rank with these elements counts or writes them."""


class KeptRows(Protocol):
    """Where rows are, and what the optimizer keeps of them, that are about to be stepped."""

    def state(self, rows: Tensor) -> dict[str, Tensor]:
        """Returns what the optimizer keeps of rows, by name."""

    def write(self, rows: Tensor, values: Tensor, state: Mapping[str, Tensor]) -> None:
        """They have been stepped to these values, with this state."""

    def give_back(self) -> None:
        """All rows are to be where the optimizer holds them: it steps them there."""


@dataclass(frozen=True, eq=False)
class SomeRows:
    """Rows of a parameter that have a gradient: those of all others are zero."""

    of: nn.Parameter
    """What the optimizer holds; it has no gradient."""
    rows: Tensor
    """Their numbers there."""
    part: nn.Parameter
    """Their values, with their gradients."""
    kept: KeptRows | None = None
    """Where they are; None: where the optimizer holds them."""

    def spread(self) -> None:
        """What the optimizer holds gets the gradient of all rows."""
        assert self.part.grad is not None
        if self.kept is not None:
            self.kept.give_back()
        self.of.grad = torch.zeros_like(self.of.detach())
        device = self.of.device
        self.of.grad.index_copy_(0, self.rows.to(device), self.part.grad.to(device))


class Found(NamedTuple):
    """What a table's cache has had of what was asked of it on a rank."""

    path: str
    slots: int
    rows: int
    """That ranks' batches read, each once a batch."""
    here: int
    """Those that were in a slot."""
    written: int
    """Rows that went back to the host to make room."""


@dataclass(frozen=True, eq=False)
class Peers:
    """The ranks along one data-parallel axis of a stage, this one among them."""

    axis: str
    group: dist.ProcessGroup | None
    """None where there is one rank."""
    size: int
    coordinate: int
    """Of this rank."""


class Packing(Protocol):
    """Moves the tensors of a bucket to flat ones and back."""

    def pack(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """Returns whole tensors as [ranks, elements of a rank], padded with zeros; None is zero."""

    def pack_own(self, tensors: Sequence[Tensor]) -> Tensor:
        """Returns this rank's rows of each tensor as [1, elements of a rank]."""

    def unpack(self, flat: Tensor, tensors: Sequence[Tensor]) -> None:
        """Writes [ranks, elements of a rank] to whole tensors."""


class MakePacking(Protocol):
    """Makes the packing of a bucket."""

    def __call__(
        self,
        sizes: Sequence[int],
        own: Sequence[int],
        chunks: Sequence[int],
        ranks: int,
        like: Tensor,
    ) -> Packing:
        """`sizes`: elements of each whole tensor; `own`: of this rank's rows; `chunks`: room for
        the rows of a rank; `like`: has the dtype and the device."""  # fmt: skip


@dataclass(frozen=True, eq=False)
class Lines:
    """The ranks among which a stage's parameters are replicated or sharded."""

    stage: int
    replicas: Peers
    """All of dp."""
    shards: Peers
    """Along dp_shard."""
    copies: Peers
    """Along dp_replicate: those that hold the same shard."""
    model: Mapping[str, dist.ProcessGroup | None]
    """Per model axis."""
    coordinates: Mapping[str, int]
    """On all axes of the stage."""
    recorder: Notes
    packing: MakePacking
    folds: Mapping[Fold, "Lines"] = field(default_factory=dict)
    """The lines of parameters for which model axes are folded (`ir.plan.folded`)."""
    counts: Mapping[str, npt.NDArray[np.float64]] = field(default_factory=dict)
    """Module path of a table -> how often each of its rows occurs, where somebody has counted."""

    def of(self, view: Stage) -> "Lines":
        """Returns the lines of parameters for which the stage is as in `view`."""
        fold = tuple([axis for axis in self.model if axis not in dict(view.model)])
        return self.folds[fold] if fold else self

    def is_primary(self, param: Param, *axes: str) -> bool:
        """Whether this rank stands for all that hold the same elements: copies lie along `axes`,
        and along the model axes that do not split the parameter."""
        copies = [*axes, *(self.model.keys() - set(param.split_on))]
        return not any(self.coordinates[axis] for axis in copies)

    def own_samples(self, shares: Sequence[int]) -> tuple[int, int]:
        """Returns how many samples of a micro-batch the rank's line along dp_shard has, and how
        many all of dp; `shares`: those of each coordinate on dp."""
        size = self.shards.size
        first = self.copies.coordinate * size
        return sum(shares[first : first + size]), sum(shares)

    @property
    def first_of_replica(self) -> bool:
        """Whether the rank has coordinate 0 on all model axes."""
        return not any(self.coordinates[axis] for axis in self.model)


@dataclass(frozen=True, slots=True)
class BucketSizes:
    """Bytes at which a form may close its buckets."""

    now: int
    low: int
    """Of the smallest parameter."""
    high: int
    """Of all that moves: one bucket."""


class ParameterStore:
    """Parameters of a stage on one rank, wherever they are. It is called as a `SyncRun` is, and
    after it: what that waits for has arrived."""

    def __init__(self, held: tuple[Held, ...]) -> None:
        """`held`: parameters as they are kept."""
        self.held = held

    def before_forward(self, call: int, ahead: Sequence[int]) -> None:
        """The call is about to read its parameters: they are to be whole where it reads them. Those
        of `ahead` may be fetched meanwhile."""

    def before_backward(self, call: int, ahead: Sequence[int]) -> None:
        """The same, for its backward, or to run it again for that."""

    def close(self, call: int) -> None:
        """The call's parameters have been read."""

    def around(self, run: "SyncRun", copies: Mapping[int, Slot]) -> "SyncRun":
        """Returns a form's run with what the store does around it; `copies`: what blocks read in
        place of a held tensor, by its id, where that is a copy of it."""
        return run

    brings_copies = False
    """Whether what it does around a run gives copies that blocks read their values; else copies are
    made around that, and it is told of none."""
    table: Any = None
    """What makes a table of a form whose tables have owners, in the place of its own; None: its own
    do."""


class SyncRun:
    """One stage's synchronisation on one rank: called by the stage and the job, by all ranks of a
    line in the same order. What a form has no use for it leaves as it is here."""

    held: tuple[Held, ...] = ()
    """What the optimizer gets, and what checkpoints and exports read once all is settled."""
    whole_updates = True
    """The optimizer's own step changes all of `held`; False: parts of it are stepped later."""

    @property
    def bucket_sizes(self) -> tuple[BucketSizes, ...]:
        """What `regroup` takes; none: the form has no buckets that can be cut anew."""
        return ()

    @property
    def reduced(self) -> tuple[Held, ...]:
        """What has the gradients, summed over dp (only there), from `finish` to `updated`."""
        return self.held

    @property
    def some_rows(self) -> tuple[SomeRows, ...]:
        """Of `held`, from `finish` to `updated`, what has gradients of some rows only, which are in
        `reduced` in its place. Rows without a gradient are stepped, too, unless that changes
        nothing."""
        return ()

    def spread(self) -> None:
        """Somebody reads gradients of all rows before `updated`: `reduced` has them, and there are
        no `some_rows`."""

    @property
    def is_settled(self) -> bool:
        """Whether `settle` has nothing to do."""
        return True

    own_states = False
    """Replicas step parameters of their own: each has its own state of the optimizer."""
    reads_batches = False
    """`begin` and `more` are given what the rank reads; else None."""

    def take_buffers(self, buffers: Sequence[Tensor]) -> None:
        """Replicas train alone (`Exchange.apart`), and forward changes these as their own samples
        say: whoever reads them once all is settled is to see one value of all replicas."""

    def hold_nothing_back(self) -> None:
        """From now on somebody reads all gradients between `finish` and `updated`: none may come
        later."""

    def begin(self, batch: Samples | None = None, next_batch: Samples | None = None) -> None:
        """Before the first micro-batch of a step: gradients are zero. `next_batch`: of the batch
        after this one; None where nobody knows it yet."""

    def more(self, batch: Samples | None = None, next_batch: Samples | None = None) -> None:
        """The same before each further batch of a step that accumulates several: gradients stay."""

    def coming(self, batches: Sequence[Samples]) -> None:
        """Before `begin` and `more`, if `reads_batches`: batches after the one that is announced
        there, in order, as far as they are known."""

    def look_up(self, batch: Samples) -> None:
        """Only the loss of a batch is wanted: what it reads of tables is there beside what is."""

    def rows_here(self, path: str) -> RowsHere | None:
        """Returns the rows that blocks have of a table; None: all."""
        return None

    def tap(
        self, path: str, made: Tensor, read: Tensor, window: tuple[tuple[int, ...], ...]
    ) -> Tensor:
        """Returns what a layer with this weight made, as it is, of what it read; `window`: stride,
        padding and dilation of a convolution."""
        return made

    def before_forward(self, call: int, ahead: Sequence[int]) -> None:
        """The call is about to read its parameters; those of `ahead` may arrive meanwhile."""

    def before_backward(self, call: int, ahead: Sequence[int]) -> None:
        """The same, for its backward, or to run it again for that."""

    def close(self, call: int) -> None:
        """The call's parameters have been read."""

    def after_forward(self, call: int, last: bool) -> None:
        """The call has run forward in a micro-batch that is trained on; `last`: the step has no
        later one."""

    def after_backward(self, call: int, last: bool) -> None:
        """The call's gradients of a micro-batch have been added; `last`: none will follow."""

    def finish(self) -> None:
        """All micro-batches are over."""

    def arrived(self) -> Sequence[Tensor]:
        """Returns those of the tensors of `reduced` whose gradients are whole before `finish`, each
        once in a step; they may be taken away."""
        return ()

    def stay_until_summed(self, names: Set[str]) -> None:
        """Gradients of these parameters are summed with those of other stages after `finish`."""

    def leave(self) -> None:
        """All sums are done: gradients may go where they are stepped; `reduced` is then of what
        is there."""

    @property
    def on_host(self) -> list[Tensor]:
        """What lies in the host's memory, where that is another than the device's."""
        return []

    def over_gradients(self, stepped: Set[int]) -> list[Tensor]:
        """Returns those of the tensors that the optimizer steps (`stepped`: their ids) whose new
        values it is to write over their gradients too, from where they are taken."""
        return []

    def skipped(self) -> None:
        """The step is left out, as its gradients are not finite: parameters stay as they were."""

    def watch(self, state: Callable[[Tensor], Mapping[str, Tensor]]) -> None:
        """Tells what the optimizer keeps of each row of one of `held`'s tensors, by name."""

    @property
    def found(self) -> tuple["Found", ...]:
        """What caches of tables have had of what was asked of them, since the job began."""
        return ()

    def updated(self, later: Callable[[], LaterStep]) -> None:
        """The optimizer has stepped; `later()` returns how to step what has no gradient yet."""
        self.written()

    def written(self) -> None:
        """What is held has new values: they are to reach all who read them."""

    def settle(self) -> None:
        """Parameters are about to be read other than by a call: all are to have their values."""

    @property
    def kept(self) -> list[Tensor]:
        """What the form has of earlier steps, for whoever counts memory."""
        return []

    def state(self) -> SyncState:
        """What the form keeps of this rank from one step to the next, for a checkpoint; all is
        settled. Nothing is changed in it later."""
        return {}

    def load(self, state: SyncState) -> None:
        """Goes on from what `state` returned on the same rank, or anew from nothing."""

    def regroup(self, bucket_bytes: int) -> None:
        """Cuts buckets of another size, between steps when all is settled. The tensors of `held`
        stay those that they are, so that the optimizer's state does."""
        raise PlanError(f"{type(self).__name__} has no buckets that can be cut anew")


class RunningForm(Protocol):
    """What a file of `forms/sync` has for the runtime."""

    def build(
        self, slots: Sequence[Slot], lines: Lines, stage: Stage, store: ParameterStore
    ) -> SyncRun:
        """Returns what runs the form in one stage of the plan, over parameters in a store."""


class RunningStore(Protocol):
    """What a file of `forms/storage` has for the runtime."""

    def build(self, slots: Sequence[Slot], lines: Lines, stage: Stage) -> ParameterStore:
        """Returns what keeps parameters of one stage of the plan."""

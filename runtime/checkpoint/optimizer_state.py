"""What an optimizer keeps of a parameter, as tensors that a checkpoint can hold.

Most keep tensors of the parameter's shape and counts. Others keep Python's numbers, lists, tensors
inside of tensors (8-bit optimizers: codes, a scale for each block, a table of values), or matrices
for a whole parameter. Each such tensor is found by a path of its own. What a rank has of a
parameter's blocks is a run of the whole parameter's: so another plan may cut it elsewhere, as long
as it cuts between blocks, which is looked at before a job begins.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd, prod
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.forms.running import Held
from meshwright.forms.trying import FAILURES, LARGE, uncompiled
from meshwright.ir.errors import PlanError
from meshwright.ir.layout.nesting import whole_runs
from meshwright.ir.torch_private import wraps_tensors
from meshwright.runtime.checkpoint.boxes import Boxed
from meshwright.runtime.checkpoint.shard_boxes import ShardBox, pieces
from meshwright.runtime.step.optimizer import like
from meshwright.runtime.step.planned_updates import members_of

_NUMBERS = {
    "int": (int, torch.int64),
    "float": (float, torch.float64),
    "bool": (bool, torch.bool),
}
_KIND = ":"
"""Before the kind of a number in its path: no tensor's path has one."""


Stored = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""By path the dtype and the shape of what a checkpoint has of a parameter's state."""


@dataclass(frozen=True, slots=True)
class _Growth:
    """How much of a state there is for a parameter of so many elements."""

    elements: int
    """For each `values` numbers; 0: as many numbers for any parameter."""
    values: int


def leaves(state: Mapping[str, Any], what: str) -> dict[str, Tensor]:
    """Returns all tensors of a parameter's state by path; `what` names whose it is in errors.

    PlanError if there is something that is neither tensors nor numbers.
    """
    found: dict[str, Tensor] = {}
    for path, x in _of_mapping("", state, what):
        if path in found or "/" in path:
            raise PlanError(
                f"{what} keeps {path!r} of a parameter: in a checkpoint each tensor has a name of "
                "its own without '/'; job.export(folder) writes parameters alone"
            )
        found[path] = x
    return found


def _of_mapping(before: str, state: Mapping[Any, Any], what: str) -> Iterator[tuple[str, Tensor]]:
    for key, value in state.items():
        yield from _of(f"{before}{key}", value, what)


def _of(path: str, value: Any, what: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        if not wraps_tensors(value):
            yield path, value
            return
        names, _ = value.__tensor_flatten__()  # type: ignore[attr-defined]
        for name in names:
            yield from _of(f"{path}.{name}", getattr(value, name), what)
    elif isinstance(value, Mapping):
        yield from _of_mapping(f"{path}.", value, what)
    elif isinstance(value, list | tuple):
        yield from _of_mapping(f"{path}.", dict(enumerate(value)), what)
    elif value is not None:
        kind = next((n for n, (of, _) in _NUMBERS.items() if type(value) is of), "")
        if not kind or "." in path:
            raise PlanError(
                f"{what} keeps {path!r}, a {type(value).__name__}, of a parameter: a checkpoint "
                "has tensors and, beside them, numbers; job.export(folder) writes parameters alone"
            )
        yield f"{path}{_KIND}{kind}", torch.tensor(value, dtype=_NUMBERS[kind][1])


def put_numbers_back(state: dict[str, Any]) -> None:
    """Makes numbers of what a checkpoint has filled in their place."""
    for path in [key for key in state if isinstance(key, str) and _KIND in key]:
        key, _, kind = path.rpartition(_KIND)
        if kind in _NUMBERS:
            state[key] = _NUMBERS[kind][0](state.pop(path).item())


class OptimizerStates:
    """The state of a job's optimizer, for what this rank holds."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._growths: dict[tuple[int, str], dict[str, _Growth]] = {}
        """By group and dtype of the parameter."""

    @cached_property
    def _groups(self) -> dict[int, tuple[torch.optim.Optimizer, dict[str, Any], int]]:
        """By parameter: who steps it, with which settings, and a number of both."""
        found: dict[int, tuple[torch.optim.Optimizer, dict[str, Any], int]] = {}
        for member in members_of(self._optimizer):
            for group in member.param_groups:
                own = {key: value for key, value in group.items() if key != "params"}
                number = len(found)
                found |= {id(p): (member, own, number) for p in group["params"]}
        return found

    def boxed(self, held: Held, *, writes: bool) -> dict[str, Boxed]:
        """Returns the state of a held tensor, by path, as boxes of the whole parameter's."""
        state = self._optimizer.state.get(held.tensor, {})
        return {
            path: self._box(held, path, x, writes)
            for path, x in leaves(state, self._name(held)).items()
        }

    def _box(self, held: Held, path: str, x: Tensor, writes: bool) -> Boxed:
        shape, own = held.param.global_shape, tuple(x.shape)
        if own == tuple(held.tensor.shape):
            return Boxed(
                shape, tuple((box, x) for box in pieces(held.param.runs, held.rows)), writes
            )
        if not own:
            return Boxed((), ((ShardBox((), (), ()), x),), writes)
        if tuple(held.tensor.shape) == shape:
            return Boxed(own, tuple((box, x) for box in pieces(whole_runs(own))), writes)
        growth, run = self._growth(held).get(path), _run(held)
        if growth is not None and not growth.elements:
            return Boxed(own, tuple((box, x) for box in pieces(whole_runs(own))), writes)
        if growth is None or run is None or len(own) != 1:
            raise self._refusal(held, path, x)
        start, length = (y * growth.values for y in run)
        if start % growth.elements or -(-length // growth.elements) != own[0]:
            raise self._refusal(held, path, x)
        whole = -(-prod(shape) * growth.values // growth.elements)
        box = ShardBox((start // growth.elements,), own, (0,))
        return Boxed((whole,), ((box, x),), writes)

    def _refusal(self, held: Held, path: str, x: Tensor) -> PlanError:
        return PlanError(
            f"{self._name(held)} keeps {path!r} of shape {tuple(x.shape)} for {held.param.fqn!r}, "
            f"of which this rank has {tuple(held.tensor.shape)} of {held.param.global_shape}: "
            "nobody knows how to cut that for another plan, so no checkpoint has it; "
            "job.export(folder) writes the parameters alone, and a plan with zero=0 and tp=1 has "
            "whole ones"
        )

    def _name(self, held: Held) -> str:
        member = self._groups.get(id(held.tensor), (self._optimizer,))[0]
        return f"the optimizer {type(member).__name__}"

    def _growth(self, held: Held) -> dict[str, _Growth]:
        """How states grow with their parameter, found by stepping two of different lengths."""
        *_, number = self._groups[id(held.tensor)]
        key = number, str(held.tensor.dtype)
        if key not in self._growths:
            short, long = (
                self.begun(held, torch.zeros(n, dtype=held.tensor.dtype, device=held.tensor.device))
                for n in (LARGE, 2 * LARGE)
            )
            found = {}
            sizes = {path: x.numel() for path, x in leaves(long, self._name(held)).items()}
            for path, x in leaves(short, self._name(held)).items():
                n = x.numel()
                if sizes.get(path) == n:
                    found[path] = _Growth(0, n)
                elif sizes.get(path) == 2 * n and n:
                    common = gcd(LARGE, n)
                    found[path] = _Growth(LARGE // common, n // common)
            self._growths[key] = found
        return self._growths[key]

    def begun(self, held: Held, values: Tensor) -> dict[str, Any]:
        """Returns the state that there is of a parameter of such values, after a step."""
        member, settings, _ = self._groups[id(held.tensor)]
        parameter = nn.Parameter(values)
        made = like(member, [{**settings, "params": [parameter]}])
        parameter.grad = torch.zeros_like(values)
        try:
            with torch.random.fork_rng(devices=[]), uncompiled():
                made.step()
        except FAILURES as error:
            raise PlanError(
                f"{self._name(held)} cannot step a parameter of shape {tuple(values.shape)} to "
                f"show what it keeps of one ({type(error).__name__}: {error})"
            ) from error
        return dict(made.state[parameter])

    def make_room(self, held: Held, stored: Stored) -> None:
        """Gives a held tensor the state that a checkpoint has, by path its dtype and shape."""
        state = self._optimizer.state[held.tensor]
        # Other paths may be of tensors inside of something that only the optimizer makes.
        if all(path.partition(_KIND)[0].isidentifier() and shape in ((), held.param.global_shape)
               for path, (_, shape) in stored.items()):  # fmt: skip
            self._check_numbers(held, stored)
            state.update(self._plain_room(held, stored))
            return
        fresh = self.begun(held, held.tensor.detach().clone())
        room = leaves(fresh, self._name(held))
        if sorted(room) != sorted(stored):
            raise PlanError(
                f"{self._name(held)} keeps {_listed(room)} of {held.param.fqn!r}, of which this "
                f"rank has {tuple(held.tensor.shape)}; the checkpoint has {_listed(stored)}: it is "
                "of another optimizer, or of blocks that this plan has not"
            )
        numbers = {path: room[path] for path in room if _KIND in path}
        state.clear()
        state.update({k: v for k, v in fresh.items() if _path_of(k, v) not in numbers} | numbers)

    def _check_numbers(self, held: Held, stored: Stored) -> None:
        """PlanError if a number of Python's is missing: checkpoints had none once, and a count that
        begins anew looks like one that goes on. torch's own optimizers count in tensors."""
        member, *_ = self._groups[id(held.tensor)]
        if type(member).__module__.startswith("torch."):
            return
        try:
            fresh = leaves(self.begun(held, torch.zeros_like(held.tensor)), self._name(held))
        except PlanError:  # it cannot be tried: what was saved of it is all that is known
            return
        known = {path.partition(_KIND)[0] for path in stored}
        lacks = [path for path in fresh if _KIND in path and path.partition(_KIND)[0] not in known]
        if lacks:
            raise PlanError(
                f"{self._name(held)} keeps {', '.join(lacks)} of {held.param.fqn!r}, but the "
                f"checkpoint has {_listed(stored)} alone: it is of another optimizer, or of a "
                "version that left numbers out, and they would begin anew"
            )

    def _plain_room(self, held: Held, stored: Stored) -> Iterator[tuple[str, Tensor]]:
        groups = self._optimizer.param_groups
        on_device = any(g.get("fused") or g.get("capturable") for g in groups)
        for path, (dtype, shape) in stored.items():
            if path == "step" or _KIND in path or shape != held.param.global_shape:
                on = held.tensor.device if on_device and _KIND not in path else "cpu"
                yield path, torch.zeros((), dtype=dtype, device=on)
            else:
                yield path, torch.zeros_like(held.tensor, dtype=dtype, requires_grad=False)


def _path_of(key: str, value: Any) -> str:
    """Where a number of a state is found; other paths are not those of numbers."""
    kind = next((n for n, (of, _) in _NUMBERS.items() if type(value) is of), "")
    return f"{key}{_KIND}{kind}"


def _run(held: Held) -> tuple[int, int] | None:
    """First element and count of what this rank has of a parameter, row by row; None if that is
    not one run."""
    boxes: Sequence[ShardBox] = pieces(held.param.runs, held.rows)
    shape = held.param.global_shape
    if len(boxes) != 1 or boxes[0].sizes[1:] != shape[1:]:
        return None
    line = prod(shape[1:])
    return boxes[0].offsets[0] * line, boxes[0].sizes[0] * line


def _listed(paths: Mapping[str, object]) -> str:
    return ", ".join(sorted(paths)) or "nothing"

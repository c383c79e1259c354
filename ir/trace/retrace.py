"""Whether a step does the same at every call, as a trace takes it to.

A copy of the step is called again and again on fake tensors; a call that does something else, or
would once a counter has moved on, is refused with the line and what keeps the state.
"""

import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from linecache import getline
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.ir.errors import TraceError
from meshwright.ir.graph.bags import GivenBags, given_bags
from meshwright.ir.graph.graph import Graph
from meshwright.ir.torch_errors import DATA_DEPENDENT
from meshwright.ir.torch_private import fake_mode, storage_key
from meshwright.ir.trace.capture import as_traced, fake_step, resized
from meshwright.ir.trace.chance import (
    clocks,
    draws_as_before,
    extreme_draws,
    own_draws,
    seed_all,
)
from meshwright.ir.trace.explain import explained, user_line, user_line_here
from meshwright.ir.trace.loss_module import Batch, LossFn, TrainingStep, find_loss, flatten_batch
from meshwright.ir.trace.moving import HeldState, kept_state, moved, put_back, watched
from meshwright.ir.trace.recording import OLD, CallRecorder, ReadMemory, RecordedCall, needed

FAR = 1_000_000
"""How much further a counter is moved to see what changes; containers grow by a thousandth."""
_SECOND = "does something else at the second call of the model than at the first"
_LATER = "would do something else at a later call"
_WAY_OUT = (
    "what forward keeps in Python is fixed when the model is traced: keep it in a tensor that is "
    "registered with register_buffer and change that in place with torch operations, or pass it as "
    "an input of the batch"
)
_MAY_RAISE: tuple[type[Exception], ...] = (
    RuntimeError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError,
    AssertionError, TraceError,
)  # fmt: skip
"""What a model's code may raise at a call that it was not written for."""
_AT_FIRST: tuple[type[Exception], ...] = (*_MAY_RAISE, *DATA_DEPENDENT)


def check_repeats(
    model: nn.Module,
    example_inputs: Batch,
    loss_fn: LossFn | None,
    graph: Graph,
    *,
    global_batch_size: int | None = None,
) -> None:
    """Raise a TraceError if a later call of the step does something else than the first.

    Compared are operators, their arguments and what they read, as far as the loss, parameters or
    buffers depend on them. A number, clock or random draw that forward reads is moved on to see
    whether anything changes then. `model` and what its code keeps elsewhere stay as they are.
    """
    batch = flatten_batch(example_inputs)
    try:
        size = global_batch_size or graph.batch_size
        compare_calls(model, batch, loss_fn, size, given_bags(graph))
    except NotRun as error:
        warnings.warn(
            f"the calls of {type(model).__name__} were not compared, since it does not run outside "
            f"of an export: {error}", stacklevel=2,
        )  # fmt: skip


class NotRun(Exception):
    """The first call already fails on fake tensors, so that there is nothing to compare."""


def compare_calls(
    model: nn.Module,
    batch: Mapping[str, Tensor],
    loss_fn: LossFn | None,
    batch_size: int,
    bags: Mapping[str, GivenBags] = MappingProxyType({}),
) -> None:
    """The same of a flat batch; raises `NotRun` if the first call fails. `bags`: of `resized`."""
    with explained(), torch.device("cpu"), fake_mode(), undisturbed(model, loss_fn):
        originals: dict[int, Tensor] = {}
        shapes = resized(batch, batch_size, bags).shapes
        step, inputs = fake_step(model, batch, loss_fn, shapes, originals)
        with as_traced(step, originals):
            _Calls(step, inputs).check()


@contextmanager
def undisturbed(model: nn.Module, loss_fn: LossFn | None) -> Iterator[None]:
    """Afterwards random generators, globals and closures of the model's code are as before."""
    with draws_as_before(), put_back(model, (loss_fn,)):
        yield


@dataclass(frozen=True, slots=True)
class _Done:
    """What one call did."""

    entries: list[RecordedCall]
    form: list[tuple[Any, ...]]
    """The same without identities, to compare."""


class _Calls:
    """The calls of one copy of a step."""

    def __init__(self, step: TrainingStep, inputs: tuple[Tensor, ...]) -> None:
        self._step, self._inputs = step, inputs
        self._recorder = CallRecorder()
        self._state = [self._kept()]
        self._buffers = frozenset(name for name, _ in step.named_buffers())
        self._tensors_before = {name: storage_key(x) for name, x in self._given().items()}

    def check(self) -> None:
        """Compare the calls: two with the same draws, and then with all that may differ."""
        with clocks() as read:
            seed_all(0)
            with own_draws() as drew_at_first:
                try:
                    first = self._run()
                except _AT_FIRST as error:
                    raise NotRun(f"{type(error).__name__}: {error}") from error
                drawn = drew_at_first()
            self._state.append(self._kept())
            self._same_tensors()
            seed_all(0)
            with own_draws() as drew:
                second = self._second()
                drawn |= drew()
        self._state.append(self._kept())
        self._compare(first, second)
        later = {
            name: kept for name, (_, kept) in moved(self._state[1], self._state[2]).items()
            if isinstance(kept.value, int | float) and not isinstance(kept.value, bool)
        }  # fmt: skip
        if later or read:
            self._move_on(later, first)
        if drawn:
            self._draw_again(first)

    def _same_tensors(self) -> None:
        """Parameters and buffers are those that the first call began with."""
        now = {name: storage_key(tensor) for name, tensor in self._given().items()}
        for name, memory in self._tensors_before.items():
            if now.get(name, memory) != memory:
                raise TraceError(
                    f"forward puts another tensor in the place of {name.replace(' model.', ' ')}"
                    f"{self._culprits()}: change it in place, in the same shape and dtype"
                )

    def _kept(self) -> dict[str, HeldState]:
        return kept_state(self._step, (self._step.loss_fn,))

    def _run(self) -> _Done:
        self._recorder.know(self._given(), dict(_tensors(self._kept())))
        with self._recorder.call() as entries:
            loss = find_loss(self._step(*self._inputs))
        kept = needed(entries, storage_key(loss), self._recorder.given)
        return _Done(kept, _form(kept, self._recorder.given))

    def _second(self) -> _Done:
        try:
            return self._run()
        except _MAY_RAISE as error:
            where, line = user_line(error.__traceback__)
            raise TraceError(
                f"{where}: `{line}` fails at the second call of the model ({error})"
                f"{self._culprits()}; {_WAY_OUT}"
            ) from error

    def _given(self) -> dict[str, Tensor]:
        step = self._step
        found: dict[str, Tensor] = {
            f"parameter {n}": p for n, p in step.named_parameters(remove_duplicate=False)
        }
        found |= {
            f"buffer {n}": b for n, b in step.named_buffers(remove_duplicate=False)
            if n in self._buffers
        }  # fmt: skip
        return found | {f"input {n}": x for n, x in zip(step.names, self._inputs, strict=True)}

    def _compare(self, first: _Done, other: _Done, when: str = _SECOND) -> None:
        if first.form == other.form:
            return
        pairs = zip(first.form, other.form, strict=False)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if at is None:
            at = min(len(first.form), len(other.form))
        before = first.entries[at] if at < len(first.entries) else None
        after = other.entries[at] if at < len(other.entries) else None
        entry = after or before
        assert entry is not None
        line = getline(entry.file, entry.line).strip()
        where = f"{entry.file}:{entry.line}: `{line}`" if line else "the model"
        what = self._difference(before, after)
        raise TraceError(f"{where} {when}: {what}{self._culprits()}; {_WAY_OUT}")

    def _difference(self, before: RecordedCall | None, after: RecordedCall | None) -> str:
        if before is None or after is None or before.operator != after.operator:
            ran = " then ".join(x.operator if x else "nothing" for x in (before, after))
            return f"other operators run ({ran})"
        if before.grad != after.grad:
            return "gradients are recorded at one of them only"
        for a, b in zip(before.args, after.args, strict=False):
            if isinstance(b, ReadMemory) and b.content.startswith(OLD):
                return f"it reads {self._holder(b)}, which an earlier call computed"
            if isinstance(a, ReadMemory) and isinstance(b, ReadMemory):
                if a.content != b.content:
                    return f"a tensor made in Python has other values ({b.form})"
            elif a != b and isinstance(a, tuple) and isinstance(b, tuple):
                return f"{a[1]} becomes {b[1]} ({after.operator})"
        return f"{after.operator} reads other tensors"

    def _holder(self, operand: ReadMemory) -> str:
        for name, tensor in _tensors(self._kept()):
            if storage_key(tensor) == operand.memory:
                return f"`{name}`"
        return "a tensor"

    def _culprits(self) -> str:
        """The Python state that has changed, to name it in a message."""
        names = dict[str, list[Any]]()
        states = [*self._state, self._kept()]
        for old, new in pairwise(states):
            for name, (before, kept) in moved(old, new).items():
                if not isinstance(kept.value, Tensor):
                    names.setdefault(name, [before]).append(kept.value)
        told = [f"`{_own(n)}` ({', '.join(map(repr, v))})"[:120] for n, v in names.items()]
        held = (n for n, x in _tensors(self._kept()) if self._recorder.is_computed(x))
        told += [f"`{name}` (a tensor)" for name in held]
        return f". What changes in Python: {', '.join(told[:3])}" if told else ""

    def _move_on(self, later: Mapping[str, HeldState], first: _Done) -> None:
        """Calls at which numbers are far on, and at which each comparison of one goes otherwise."""
        lines = dict[str, None]()

        def note(outcome: bool) -> bool:
            lines.setdefault(": `".join(user_line_here()) + "`")
            return outcome

        self._again(later, note, first, _LATER)
        for line in lines:
            self._again(
                later, _once(line), first, f"would do something else where {line} decides otherwise"
            )
        for kept in later.values():
            _far(kept)
        self._again({}, note, first, _LATER)

    def _again(
        self, later: Mapping[str, HeldState], asked: Callable[[bool], bool], first: _Done, when: str
    ) -> None:
        for kept in later.values():
            value = kept.place.get()
            if isinstance(value, int | float):
                kept.place.put(watched(value, asked))
        with clocks(partial(watched, asked=asked)):
            self._try(first, when)

    def _try(self, first: _Done, when: str) -> None:
        try:
            other = self._run()
        except _MAY_RAISE as error:
            where, line = user_line(error.__traceback__)
            raise TraceError(
                f"{where}: `{line}` {when}: it fails ({error}){self._culprits()}; {_WAY_OUT}"
            ) from error
        self._compare(first, other, when)

    def _draw_again(self, first: _Done) -> None:
        """Calls with other draws of Python's and NumPy's generators, and with extreme ones."""
        when = "does something else at another draw of Python's or NumPy's random numbers"
        for seed in range(5):
            seed_all(seed)
            self._try(first, when)
        for value in (0.0, 1.0 - 2**-53):
            with extreme_draws(value):
                self._try(first, when)


def _once(line: str) -> Callable[[bool], bool]:
    """Turns the first comparison at `line` around."""
    left = [True]

    def asked(outcome: bool) -> bool:
        if left and ": `".join(user_line_here()) + "`" == line:
            left.clear()
            return not outcome
        return outcome

    return asked


def _far(kept: HeldState) -> None:
    value = kept.place.get()
    if isinstance(value, int | float):
        kept.place.put(value + FAR)
    elif isinstance(value, list | deque) and value:
        value.extend([value[-1]] * (FAR // 1000))


def _own(name: str) -> str:
    return name.removeprefix("model.")


def _tensors(state: Mapping[str, HeldState]) -> Iterator[tuple[str, Tensor]]:
    for name, kept in state.items():
        if isinstance(kept.value, Tensor):
            yield _own(name), kept.value


def _form(entries: Sequence[RecordedCall], given: Mapping[int, str]) -> list[tuple[Any, ...]]:
    """The entries with memory numbered as it appears."""
    numbers: dict[int, Any] = dict(given)

    def number(memory: int) -> Any:
        return numbers.setdefault(memory, len(numbers))

    return [
        (
            entry.operator, entry.grad,
            tuple((x.form, x.content or number(x.memory)) if isinstance(x, ReadMemory) else x
                  for x in entry.args),
            tuple(map(number, entry.outputs)),
        )
        for entry in entries
    ]  # fmt: skip

"""Loops over tokens, or over chunks of them, become one operator (`ir.graph.recurrence`).

Found by structure: each round reads its place of some tensors, `x[:, i]`, or its part of them,
`x[:, i * w : (i + 1) * w]`, and what the round before has left; and leaves something in its place
of others, or at the end of a list. What is done again and again without places is one, too, if it
reads nothing else. What a round computes is traced once, alone. A loop whose rounds are not alike,
or name sizes, stays as it is; so does a last round whose part is shorter.
"""

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx

from meshwright.ir.graph.graph import Arg, Ref
from meshwright.ir.graph.recurrence import RECURRENCE, RecurrentStep, StepCall
from meshwright.ir.torch_private import (
    OpOverload,
    fake_mode,
    no_modes,
    schema_arguments,
    storage_key,
    written_arguments,
)
from meshwright.ir.trace.loop_text import (
    LoopRound,
    NotAlike,
    RoundPart,
    left_in,
    part_of,
    read_text,
)
from meshwright.ir.trace.loops import SeenLoop
from meshwright.ir.trace.stand_ins import standing_in

SHORTEST = 4
"""Rounds from which on a loop is worth it."""
_SIZES = frozenset("repeats sections shape size sizes split_size".split())
_PLACES = frozenset("device layout memory_format pin_memory".split())
_MAY_RAISE: tuple[type[Exception], ...] = (
    RuntimeError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError,
    AssertionError, NameError,
)  # fmt: skip
_NO_TENSOR = (bool, int, float, str, type(None))


def run_steps(loop: SeenLoop) -> int:
    """Do rounds that are alike with one operator, from the first on; how many that were."""
    length = len(loop.over)
    if loop.over.step != 1 or loop.over.start:
        return 0
    for rounds in (length, length - 1):  # the last part of a tensor may be shorter than others
        if rounds < SHORTEST:
            return 0
        try:
            found = read_text(loop, rounds)
        except NotAlike:
            continue
        return rounds if _run(loop, found) else 0
    return 0


def _run(loop: SeenLoop, found: LoopRound) -> bool:
    try:
        step, states, steps, fixed = _traced_round(loop, found)
    except NotAlike:
        return False
    dims = [place.dim for _, place in found.reads] or [0]
    made_dims = [*(place.dim for place in found.writes.values()), *(0 for _ in found.lists)]
    results = RECURRENCE(states, steps, fixed, dims, made_dims, step.text())
    count = len(states)
    loop.assign({
        found.number: loop.over[found.rounds - 1], **found.told,
        **dict(zip(found.carried, results[:count], strict=True)),
    })  # fmt: skip
    made = dict(zip((*found.writes, *found.lists), results[count:], strict=True))
    for name, place in found.writes.items():
        part = made[name].flatten(place.dim, place.dim + 1) if place.width else made[name]
        _used(loop.values[name], place, found.rounds).copy_(part)
    for name in found.lists:
        whole = found.rounds == len(loop.over)
        if whole and not loop.values[name] and _is_only_joined(name, loop):
            loop.assign({name: Parts(made[name])})
        else:
            loop.values[name].extend(made[name].unbind(0))
    return True


def _side_by_side(whole: Tensor, place: RoundPart, rounds: int) -> Tensor:
    """A view of a tensor in which round i's part is place i along the part's dim."""
    view, dim = _used(whole, place, rounds), place.dim
    if not place.width:
        return view
    return torch.unflatten(view, dim, (rounds, place.width))


def _used(whole: Tensor, place: RoundPart, rounds: int) -> Tensor:
    """What the rounds have of a tensor."""
    used = rounds * max(place.width, 1)
    whole_dims = (slice(None),) * place.dim
    return whole if whole.shape[place.dim] == used else whole[(*whole_dims, slice(0, used))]


class Parts(list[Tensor]):
    """Stands for a list of the parts of a tensor along its first dim, and is never looked into."""

    def __init__(self, whole: Tensor) -> None:
        super().__init__()
        self.whole = whole


@contextmanager
def joining_parts() -> Iterator[None]:
    """Inside, `torch.stack` and `torch.cat` take `Parts`, too."""
    stacked: Any = torch.stack
    put_together: Any = torch.cat

    def stack(tensors: Any, dim: int = 0, **kwargs: Any) -> Tensor:
        if isinstance(tensors, Parts):
            return tensors.whole.movedim(0, dim)
        found: Tensor = stacked(tensors, dim, **kwargs)
        return found

    def cat(tensors: Any, dim: int = 0, **kwargs: Any) -> Tensor:
        if isinstance(tensors, Parts):
            along = dim % (tensors.whole.ndim - 1)
            return tensors.whole.movedim(0, along).flatten(along, along + 1)
        found: Tensor = put_together(tensors, dim, **kwargs)
        return found

    with standing_in(torch, "stack", stack), standing_in(torch, "cat", cat):
        yield


def _is_only_joined(name: str, loop: SeenLoop) -> bool:
    """Whether all that the function does with a list after the loop is to join its parts once."""
    if loop.is_shared(name):
        return False
    joined = False
    for line in loop.rest():
        found = [x for x in ast.walk(line) if isinstance(x, ast.Name) and x.id == name]
        reads = [x for x in found if not isinstance(x.ctx, ast.Store)]
        if reads and (joined or len(reads) > 1 or not _joins(line, reads[0])):
            return False
        joined = joined or bool(reads)
        if isinstance(line, ast.Assign) and any(x in line.targets for x in found):
            return joined
    return joined


def _joins(line: ast.stmt, read: ast.Name) -> bool:
    """Whether a line reads a list to stack it or to put it together, and for nothing else."""
    return any(
        isinstance(x, ast.Call) and ast.unparse(x.func) in ("torch.stack", "torch.cat")
        and x.args and x.args[0] is read and len(x.args) <= 2
        and all(keyword.arg == "dim" for keyword in x.keywords)
        for x in ast.walk(line)
    )  # fmt: skip


_Inputs = tuple[RecurrentStep, list[Tensor], list[Tensor], list[Tensor]]


def _traced_round(loop: SeenLoop, found: LoopRound) -> _Inputs:
    """The step, and the tensors that it begins with, goes along and has throughout."""
    values, rounds = {**loop.values, **found.held}, found.rounds
    states = [x for x in map(values.get, found.carried) if isinstance(x, Tensor)]
    steps = [_side_by_side(values[name], place, rounds) for name, place in found.reads]
    fixed = [name for name in found.fixed if isinstance(values[name], Tensor)]
    if len(states) < len(found.carried) or not (steps or states) or (fixed and not steps):
        raise NotAlike
    if not steps:  # the same again and again; its places say how often
        steps = [torch.zeros(rounds, dtype=states[0].dtype)]
    names = [
        *found.carried, *(part_of(i) for i in range(len(steps))), *fixed
    ]  # fmt: skip
    results = [*found.carried, *(left_in(name) for name in (*found.writes, *found.lists))]
    along = [place.dim for _, place in found.reads] or [0]
    parts = [x.select(dim, 0) for x, dim in zip(steps, along, strict=True)]
    others = found.kinds | {n: values[n] for n in found.fixed if n not in fixed}
    run = _as_function(loop, found, names, results, others)
    likes = [(tuple(x.shape), x.dtype) for x in (*states, *parts, *(values[n] for n in fixed))]
    count, kinds = len(states), [x.dtype for x in states]
    for _ in range(2):
        step, made = _traced(run, likes)
        if any(like[0] != shape for like, (shape, _) in zip(likes[:count], made, strict=False)):
            raise NotAlike
        after = [dtype for _, dtype in made[:count]]
        if after == [dtype for _, dtype in likes[:count]]:
            break
        # What is zero at first may be in a narrower type than what is added to it.
        if any(torch.promote_types(a, b) != b for a, b in zip(kinds, after, strict=True)):
            raise NotAlike
        likes[:count] = made[:count]
    else:
        raise NotAlike
    _check_left(found, values, made[count:])
    _check_apart([values[n] for n in found.writes], [*states, *steps, *(values[n] for n in fixed)])
    begun = [
        x if x.dtype == dtype else x.to(dtype)
        for x, (_, dtype) in zip(states, likes[:count], strict=True)
    ]
    return step, begun, steps, [values[name] for name in fixed]


def _check_left(
    found: LoopRound, values: Any, made: list[tuple[tuple[int, ...], torch.dtype]]
) -> None:
    """What a round leaves in its place has that place's size: nothing is broadcast."""
    for (name, place), (shape, _) in zip(found.writes.items(), made, strict=False):
        whole, dim = tuple(values[name].shape), place.dim
        width = [place.width] if place.width else []
        if (*whole[:dim], *width, *whole[dim + 1 :]) != shape:
            raise NotAlike


def _check_apart(written: list[Tensor], read: list[Tensor]) -> None:
    """What is written shares no memory with what is read, or with one another."""
    keys = [storage_key(x) for x in written]
    if len({*keys}) < len(keys) or {*keys} & {storage_key(x) for x in read}:
        raise NotAlike


def _as_function(
    loop: SeenLoop, found: LoopRound, names: list[str], results: list[str], others: dict[str, Any]
) -> Any:
    body = ast.fix_missing_locations(ast.Module(list(found.lines), []))
    code = compile(body, loop.code.co_filename, "exec")

    def run(*tensors: Tensor) -> list[Tensor]:
        local = {**others, **dict(zip(names, tensors, strict=True))}
        exec(code, dict(loop.names), local)
        return [local[name] for name in results]

    return run


_Likes = list[tuple[tuple[int, ...], torch.dtype]]


def _traced(run: Any, likes: _Likes) -> tuple[RecurrentStep, _Likes]:
    """The round as data, on tensors like these, and what its results are like."""
    with no_modes(), torch.device("cpu"), torch.no_grad(), fake_mode():
        given = [torch.empty(shape, dtype=dtype) for shape, dtype in likes]
        try:
            module = make_fx(run, pre_dispatch=True)(*given)
        except _MAY_RAISE as error:  # if it is the model's own fault, the loop raises it again
            raise NotAlike from error
    return _as_data(list(module.graph.nodes), [dtype for _, dtype in likes])


def _as_data(nodes: list[Node], dtypes: list[torch.dtype]) -> tuple[RecurrentStep, _Likes]:
    numbers = dict[Node, str]()
    calls = list[StepCall]()
    for node in nodes:
        if node.op == "placeholder":
            numbers[node] = str(len(numbers))
        elif node.op == "call_function":
            numbers[node] = str(len(numbers))
            calls.append(_call(node, numbers))
        elif node.op == "output":
            made: Any = node.args[0]
            if not all(isinstance(x, Node) for x in made):
                raise NotAlike
            likes = [(tuple(x.meta["val"].shape), x.meta["val"].dtype) for x in made]
            names = tuple(str(x).removeprefix("torch.") for x in dtypes)
            return RecurrentStep(names, tuple(calls), tuple(numbers[x] for x in made)), likes
        else:
            raise NotAlike
    raise AssertionError("a graph without an output")


def _call(node: Node, numbers: dict[Node, str]) -> StepCall:
    target = node.target
    if not isinstance(target, OpOverload) or not isinstance(node.meta.get("val"), Tensor):
        raise NotAlike
    if written_arguments(target) or torch.Tag.nondeterministic_seeded in target.tags:
        raise NotAlike
    positional = iter(node.args)
    args = list[tuple[str, Arg]]()
    for argument in schema_arguments(target):
        if argument.name in node.kwargs:
            value: Any = node.kwargs[argument.name]
        elif argument.kwarg_only:
            value = argument.default_value
        else:
            value = next(positional, argument.default_value)
        if argument.name in _SIZES:
            raise NotAlike
        args.append((argument.name, None if argument.name in _PLACES else _data(value, numbers)))
    return StepCall(str(target), tuple(args), numbers[node])


def _data(value: Any, numbers: dict[Node, str]) -> Arg:
    if isinstance(value, Node):
        return Ref(numbers[value])
    if isinstance(value, list | tuple):
        return tuple(_data(x, numbers) for x in value)
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, _NO_TENSOR):
        return value
    raise NotAlike

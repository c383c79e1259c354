"""Times single ops: forward, gradients of all operands, of activations and of parameters alone."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from time import perf_counter

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from meshwright.codegen.collectives.comm import Comm
from meshwright.codegen.lower.local import bind
from meshwright.ir.graph.images import channels_last
from meshwright.ir.graph.op_site import Form, In, RankDevice
from meshwright.ir.profile.profile import OpRecord, Timing
from meshwright.ir.torch_private import storage_key
from meshwright.runtime.profiling.free_lines import FreeLine
from meshwright.runtime.profiling.stopwatch import Stopwatch, watch_for
from meshwright.runtime.profiling.tasks import OpTask, TaskInput
from meshwright.runtime.profiling.timings import summarised
from meshwright.runtime.profiling.values import drawn

_COLD_BYTES = 64 * 2**20
_COPIES = (2, 12)
_LEAST, _MOST = 5, 100
_FLOOR_CALLS = 20
_SEED = 21

Call = Callable[[], object]


@dataclass
class _OpTimes:
    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)
    inputs: list[float] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)


def measure_op(
    task: OpTask,
    device: torch.device,
    *,
    budget_s: float,
    agree: Callable[[bool], bool] = bool,
) -> OpRecord:
    """Inputs take turns, so that they come from memory as in training."""
    sets = [(x, _bound(task, x, device)) for x in _operands(task, device)]
    watch = watch_for(device, host=False)
    seen, calls = _OpTimes(), 0
    floor_s = _floor_s(watch, device)
    ends = perf_counter() + budget_s
    turns = cycle(sets)
    while agree(calls < _LEAST or (calls < _MOST and perf_counter() < ends)):
        # One that faults memory in, and the rest of the turn.
        for _ in range(1 if calls else len(sets)):
            _time(task, *next(turns), watch, seen)
        if not calls:
            seen = _OpTimes()
        calls += 1
    return OpRecord(
        key=task.key,
        target=task.target,
        op_class=task.op_class,
        dtype=task.dtype,
        inputs=tuple(o.shape for o in task.operands),
        flops=task.flops,
        moved_bytes=task.moved_bytes,
        forward=summarised(seen.forward),
        backward=_timing(seen.backward, floor_s),
        backward_input=_timing(seen.inputs, floor_s),
        backward_weight=_timing(seen.weights, floor_s),
        saved_bytes=_saved_bytes(task, *sets[0]),
        causal=task.causal,
        channels_last=task.channels_last,
    )


def _timing(seconds: list[float], floor_s: float) -> Timing | None:
    return summarised([s - floor_s for s in seconds]) if seconds else None


def _floor_s(watch: Stopwatch, device: torch.device) -> float:
    """Of a backward through next to nothing: the call of autograd is not the op's."""
    x = torch.ones(1, device=device, requires_grad=True)
    seconds = []
    for _ in range(_FLOOR_CALLS):
        y, arriving = x.view_as(x), torch.ones_like(x)
        _, took = watch.time(partial(torch.autograd.grad, [y], [x], [arriving]))
        seconds.append(took)
    return min(seconds)


def _operands(task: OpTask, device: torch.device) -> list[list[Tensor]]:
    """Sets of operands that together are more than caches hold."""
    draw = torch.Generator().manual_seed(_SEED)
    first = [_operand(o, device, draw) for o in task.operands]
    nbytes = sum(x.nbytes for x in first) + 1
    count = min(max(_COPIES[0], -(-_COLD_BYTES // nbytes)), _COPIES[1])
    copies = ([x.detach().clone().requires_grad_(x.requires_grad) for x in first]
              for _ in range(count - 1))  # fmt: skip
    return [first, *copies]


def _operand(operand: TaskInput, device: torch.device, draw: torch.Generator) -> Tensor:
    if operand.step:
        return torch.arange(0, operand.shape[0] * operand.step, operand.step, device=device)
    x = drawn(operand.shape, operand.dtype, device, operand.below, draw, positive=True)
    x = channels_last(x) if operand.channels_last else x
    return x.requires_grad_(operand.requires_grad and x.is_floating_point())


def _bound(task: OpTask, operands: Sequence[Tensor], device: torch.device) -> Call:
    """What generated code would call."""
    sizes = {"dp": 1, **task.sizes}
    lines = {axis: FreeLine(size, 0) for axis, size in sizes.items()}
    comm = Comm(lines, sizes, dict.fromkeys(sizes, 0), device=device)

    def resolve(arg: In | RankDevice) -> object:
        return operands[arg.index] if isinstance(arg, In) else device

    target, args, kwargs = bind(Form(task.call, task.args), resolve)  # type: ignore[arg-type]
    if task.call.startswith("sharded."):
        args = (comm, *args)
    return lambda: target(*args, **kwargs)


def _time(
    task: OpTask, operands: Sequence[Tensor], call: Call, watch: Stopwatch, seen: _OpTimes
) -> None:
    result, took = watch.time(call)
    seen.forward.append(took)
    outputs = result if isinstance(result, tuple | list) else (result,)
    made = [x for x in outputs if isinstance(x, Tensor) and x.requires_grad]
    arriving = [torch.ones_like(x) for x in made]
    inputs, weights = _wanted(task, operands, param=False), _wanted(task, operands, param=True)
    if not made:
        return
    for wanted, seconds in (
        (inputs, seen.inputs),
        (weights, seen.weights),
        ([*inputs, *weights], seen.backward),
    ):
        if wanted:
            _, took = watch.time(
                lambda wanted=wanted: torch.autograd.grad(  # type: ignore[misc]
                    made, wanted, arriving, retain_graph=True, allow_unused=True
                )
            )
            seconds.append(took)


def _wanted(task: OpTask, operands: Sequence[Tensor], *, param: bool) -> list[Tensor]:
    return [
        x
        for x, operand in zip(operands, task.operands, strict=True)
        if x.requires_grad and operand.is_param == param
    ]


def _saved_bytes(task: OpTask, operands: Sequence[Tensor], call: Call) -> int:
    """What autograd keeps beside parameters, each storage once."""
    params = {storage_key(x) for x, o in zip(operands, task.operands, strict=True) if o.is_param}
    kept: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        kept.append(x)
        return x

    with saved_tensors_hooks(keep, lambda x: x):
        result = call()
    storages = {storage_key(x): x.untyped_storage().nbytes() for x in kept}
    del result
    return sum(nbytes for key, nbytes in storages.items() if key not in params)

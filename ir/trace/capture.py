"""Runs the training step once on fake tensors and returns the exported graph.

The user's model is not touched: a structural copy is made whose tensors are fake.
"""

import copy
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from meshwright.ir.deadline import part_of_busy
from meshwright.ir.errors import TraceError
from meshwright.ir.graph.bags import GivenBags
from meshwright.ir.graph.graph import MAX_BATCH, MAX_ELEMENTS
from meshwright.ir.graph.images import channels_last, is_channels_last
from meshwright.ir.precision import CopyTypes
from meshwright.ir.text.plain_text import shown
from meshwright.ir.torch_modes import no_python_of_graphs, short_traces
from meshwright.ir.trace.buffers import assigned_buffers
from meshwright.ir.trace.chance import clocks, own_draws
from meshwright.ir.trace.declared import use_declared
from meshwright.ir.trace.distributions import valid_distributions
from meshwright.ir.trace.forbidden import check_modules, check_tensor, forbidden
from meshwright.ir.trace.functions import own_functions
from meshwright.ir.trace.hf_branches import as_it_runs
from meshwright.ir.trace.hooks import check_hooks, no_gradient_hooks
from meshwright.ir.trace.loops import SeenLoop, seen_loops
from meshwright.ir.trace.loss_module import LossFn, TrainingStep
from meshwright.ir.trace.module_numbers import wide_parameters
from meshwright.ir.trace.moving import HeldState, kept_state, moved
from meshwright.ir.trace.noop_to import parameters_stay
from meshwright.ir.trace.row_solving import solve_rows
from meshwright.ir.trace.step_loops import joining_parts, run_steps
from meshwright.ir.trace.trace_constants import KnownValues, Own


@dataclass(frozen=True, slots=True)
class Capture:
    """An exported training step and where its tensors come from."""

    program: ExportedProgram
    names: tuple[str, ...]
    """Input names, in the order of the program's inputs."""
    originals: Mapping[int, torch.Tensor]
    """id of a fake tensor of the copy -> the user's tensor."""
    step: TrainingStep
    """The fake copy; holds the fakes alive."""
    batch_size: int
    batch_inputs: tuple[str, ...]
    left_traces: bool
    """Whether forward changed what the model keeps in Python, drew a random number there or read a
    clock: a later call may do something else."""


def capture(
    model: nn.Module,
    batch: Mapping[str, torch.Tensor],
    loss_fn: LossFn | None,
    global_batch_size: int | None,
    copies: CopyTypes | None,
    bags: Mapping[str, GivenBags] = MappingProxyType({}),
) -> Capture:
    """Export the step; to be called inside the fake mode. `copies`: what it reads of parameters;
    None: the user's; `bags`: of `resized`."""
    if not any(True for _ in model.parameters()):
        raise TraceError(f"{type(model).__name__} has no parameters: there is nothing to train")
    check_hooks(model)
    check_modules(model)
    sizes = resized(batch, global_batch_size, bags)
    originals: dict[int, torch.Tensor] = {}
    step, inputs = fake_step(model, batch, loss_fn, sizes.shapes, originals, copies)
    program, left_traces = _export(step, inputs, originals)
    return Capture(
        program, tuple(batch), originals, step, sizes.batch_size, sizes.batch_inputs, left_traces
    )  # fmt: skip


def fake_step(
    model: nn.Module,
    batch: Mapping[str, torch.Tensor],
    loss_fn: LossFn | None,
    sizes: Mapping[str, tuple[int, ...]],
    originals: dict[int, torch.Tensor],
    copies: CopyTypes | None = None,
) -> tuple[TrainingStep, tuple[torch.Tensor, ...]]:
    """A copy of the step on fake tensors, in training mode, and its inputs of `sizes`."""
    step = fake_copy(TrainingStep(model, loss_fn, tuple(batch), copies), originals)
    if not model.training:
        step.train()
    return step, tuple(_input(sizes[name], tensor) for name, tensor in batch.items())


def _input(shape: tuple[int, ...], given: torch.Tensor) -> torch.Tensor:
    """An input of the step, with its channels innermost if the example's are."""
    made = torch.empty(shape, dtype=given.dtype)
    return channels_last(made) if is_channels_last(given) else made


FORWARD = 0.4
"""Of the time of a trace, that a model's forward takes: torch, which asks no clock, works on for
longer afterwards."""


def _export(
    step: TrainingStep, inputs: tuple[torch.Tensor, ...], originals: Mapping[int, torch.Tensor]
) -> tuple[ExportedProgram, bool]:
    """The program, and whether forward left traces in Python."""
    after: dict[str, HeldState] = {}
    functions = (step.loss_fn,)
    # An export puts attributes back; hooks run before that.
    hook = step.register_forward_hook(lambda *_: after.update(kept_state(step, functions)))
    with as_traced(step, originals), own_draws() as drawn, clocks() as read:
        before = kept_state(step, functions)
        with part_of_busy(FORWARD), no_python_of_graphs(), short_traces():
            program = torch.export.export(step, inputs, strict=False)
    hook.remove()
    return program, bool(moved(before, after) or read or drawn())


@contextmanager
def as_traced(step: TrainingStep, originals: Mapping[int, torch.Tensor]) -> Iterator[None]:
    """Inside, a (copied) step runs on fake tensors as it does in a trace."""
    with ExitStack() as stack:
        # An LSTM puts its weights into a list again, which is no change.
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "The tensor attribute")
        use_declared(step.model)
        if has_hf_code(step.model):
            from meshwright.ir.trace import hf

            hf.prepare(step.model)
            stack.enter_context(hf.tracing(step.names))
            stack.enter_context(as_it_runs(step.model))
        stack.enter_context(joining_parts())
        stack.enter_context(valid_distributions())
        stack.enter_context(seen_loops(step.model, _do_loop))
        stack.enter_context(KnownValues(_own(step, originals)))
        stack.enter_context(own_functions())
        stack.enter_context(assigned_buffers())
        stack.enter_context(parameters_stay())
        stack.enter_context(no_gradient_hooks())
        stack.enter_context(forbidden())
        yield


def _do_loop(loop: SeenLoop) -> int:
    return len(loop.over) if solve_rows(loop) else run_steps(loop)


def _own(step: TrainingStep, originals: Mapping[int, torch.Tensor]) -> Own:
    return {
        id(originals[id(tensor)]): (module, name)
        for module in step.modules()
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
        if tensor is not None and id(tensor) in originals
    }


def is_hf(model: nn.Module) -> bool:
    """Whether some of the model comes from transformers, told without importing it."""
    return any(
        base.__module__ == "transformers.modeling_utils"
        for module in model.modules()
        for base in type(module).__mro__
    )


def has_hf_code(model: nn.Module) -> bool:
    """Whether any layer of the model is one of transformers, told without importing it."""
    return any(type(module).__module__.startswith("transformers.") for module in model.modules())


@dataclass(frozen=True, slots=True)
class InputSizes:
    """How large the inputs of a step are."""

    shapes: Mapping[str, tuple[int, ...]]
    batch_size: int
    batch_inputs: tuple[str, ...]
    """Those that have so much of each sample, along dim 0."""


def resized(
    batch: Mapping[str, torch.Tensor],
    global_batch_size: int | None,
    bags: Mapping[str, GivenBags] = MappingProxyType({}),
) -> InputSizes:
    """Sizes of the inputs with the batch dim set to `global_batch_size`.

    `bags`: inputs that have some values of each sample, where others say; they get as many of each
    as the example has on the average, rounded up.
    """
    if not batch:
        raise TraceError("example_inputs is empty: give one batch, as a dict or a tuple of tensors")
    name, first = next(iter(batch.items()))
    if first.ndim == 0:
        raise TraceError(f"input {name!r} has no dims; dim 0 of the first input must be the batch")
    ends = {each.offsets for each in bags.values() if each.last}
    begun = bags[name].offsets if name in bags else name
    given = batch[begun].shape[0] - (begun in ends)
    wanted = given if global_batch_size is None else global_batch_size
    if wanted < 1:
        raise TraceError(f"global_batch_size is {wanted}; it must be at least 1")
    if wanted > MAX_BATCH:
        raise TraceError(f"global_batch_size is {shown(wanted)}; at most {MAX_BATCH:,} is taken")
    shapes, by_sample = dict[str, tuple[int, ...]](), []
    for key, value in batch.items():
        shapes[key] = tuple(value.shape)
        of_samples = key in bags and _bag_count(batch, bags[key]) == given
        if of_samples:
            shapes[key] = (wanted * max(1, -(-len(value) // given)),)
        elif key in ends and len(value) == given + 1:
            shapes[key] = (wanted + 1,)
        elif value.shape[:1] == (given,):
            shapes[key], of_samples = (wanted, *value.shape[1:]), True
        if of_samples:
            by_sample.append(key)
        if prod(shapes[key]) > MAX_ELEMENTS:
            raise TraceError(
                f"input {key!r} would be {shapes[key]} with global_batch_size {wanted:,}; at most "
                f"{MAX_ELEMENTS:,} elements are taken"
            )
    return InputSizes(shapes, wanted, tuple(by_sample))


def _bag_count(batch: Mapping[str, torch.Tensor], bags: GivenBags) -> int:
    return len(batch[bags.offsets]) - bags.last


def fake_copy(module: TrainingStep, originals: dict[int, torch.Tensor]) -> TrainingStep:
    """A copy of `module` whose tensors are fake; fills in the original of each fake by id.

    Tensors on the meta device become CPU ones, as the meta device changes what operators do.
    """
    memo: dict[int, Any] = {}
    copies = module.copies
    wide = wide_parameters(module.model, copies) if copies else frozenset()
    for name, tensor in _tensors(module):
        if id(tensor) not in memo:
            dtype = tensor.dtype
            if copies and isinstance(tensor, nn.Parameter) and dtype.is_floating_point:
                dtype = copies.stepped if id(tensor) in wide else copies.read
            fake = _fake_like(name.removeprefix("model."), tensor, dtype)
            memo[id(tensor)] = fake
            originals[id(fake)] = tensor
    return copy.deepcopy(module, memo)


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, buffers and tensors that are plain attributes, also inside lists and dicts."""
    for path, child in module.named_modules():
        start = f"{path}." if path else ""
        for name, tensor in (*child._parameters.items(), *child._buffers.items()):
            if tensor is not None:
                yield start + name, tensor
        for name, value in vars(child).items():
            if name not in ("_parameters", "_buffers", "_modules"):
                for tensor in _nested(value):
                    yield start + name, tensor


def _nested(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple | set):
        for item in value:
            yield from _nested(item)
    elif isinstance(value, dict):
        yield from _nested(list(value.values()))


def _fake_like(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if nn.parameter.is_lazy(tensor):
        raise TraceError(
            "the model has lazy parameters without a shape: run it once on one batch first"
        )
    check_tensor(name, tensor)
    fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake.requires_grad_(tensor.requires_grad)

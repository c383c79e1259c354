"""Traces a model's training step to a Graph; nothing is allocated and the model is not changed."""

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from meshwright.ir.deadline import check_time
from meshwright.ir.errors import MeshwrightError, TraceError
from meshwright.ir.garbage import rare_collections
from meshwright.ir.graph.bags import GivenBags, given_bags
from meshwright.ir.graph.blocks import find_blocks
from meshwright.ir.graph.costed import costed
from meshwright.ir.graph.graph import Fusion, Graph, Kind, Op, Tensor
from meshwright.ir.graph.images import is_channels_last
from meshwright.ir.graph.reached import only_reached
from meshwright.ir.graph.routed_graph import with_routing
from meshwright.ir.precision import copies_of, in_which_traced, scaling_of
from meshwright.ir.precision import precision as known_precision
from meshwright.ir.text.digest import digest
from meshwright.ir.text.plain_text import MAX_NAME_CHARS, odd_character, printable, shown
from meshwright.ir.torch_errors import SPEC_ERROR
from meshwright.ir.torch_private import fake_mode
from meshwright.ir.trace.annotate import marks_of, tracing
from meshwright.ir.trace.capture import Capture, capture, is_hf
from meshwright.ir.trace.explain import explained, not_traced
from meshwright.ir.trace.flat_trace import Raw, dtype_name, read
from meshwright.ir.trace.fuse import Wins, fuse
from meshwright.ir.trace.hf_inputs import example_inputs as example_inputs_of
from meshwright.ir.trace.hints import hints_of
from meshwright.ir.trace.loss_module import Batch, LossFn, flatten_batch
from meshwright.ir.trace.narrow_products import narrow_products
from meshwright.ir.trace.prelude import prelude_first
from meshwright.ir.trace.retrace import NotRun, compare_calls, undisturbed
from meshwright.ir.trace.simplify import simplify


def trace(
    model: nn.Module,
    example_inputs: Batch | None = None,
    loss_fn: LossFn | None = None,
    *,
    global_batch_size: int | None = None,
    kernels: Sequence[str | Fusion] = (),
    wins: Wins | None = None,
    precision: str = "",
) -> Graph:
    """The training step of `model` as data, at the global batch size (default: the example's).

    `precision`: a file of `ir/precision` in whose numbers the model computes; without one, in those
    of its parameters.

    `kernels`: the fused ones to put in where their patterns hold (`ir.kernels.KERNELS`) and, if
    `wins` is asked, where they are worth it; or a plan's, for the graph that it was made for.
    """
    started = time.perf_counter()
    name = printable(type(model).__name__)[:MAX_NAME_CHARS]
    if example_inputs is None:
        example_inputs = _own_inputs(model)
    batch = flatten_batch(example_inputs)
    _check_names(model, batch)
    try:
        bags = _bags_of(model, batch, loss_fn)
        graph, left_traces = _traced(
            model, batch, loss_fn, global_batch_size, kernels, wins, precision, bags
        )
    except MeshwrightError:
        raise
    except _FROM_TORCH as error:
        raise _reason(error, model, batch, loss_fn, global_batch_size) from error
    if left_traces:
        _compare(model, batch, loss_fn, graph)
    seconds = f"{time.perf_counter() - started:.1f}"
    graph.meta.update(model=name, torch=torch.__version__, trace_s=seconds)
    again = partial(
        trace, example_inputs=example_inputs, loss_fn=loss_fn, global_batch_size=global_batch_size,
        kernels=kernels, wins=wins,
    )  # fmt: skip
    key = id(graph)
    gone = weakref.ref(graph, lambda _: _SOURCES.pop(key, None))
    _SOURCES[key] = _TracedFrom(gone, weakref.ref(model), again)
    return graph


class _TracedFrom(NamedTuple):
    """What a graph was traced from."""

    graph: weakref.ref[Graph]
    model: weakref.ref[nn.Module]
    again: Callable[..., Graph]


_SOURCES: dict[int, _TracedFrom] = {}


def in_precision(graph: Graph, precision: str) -> Graph:
    """The same model traced in another precision; the graph itself if that is all the same, or if
    its model is not there any more."""
    source = _SOURCES.get(id(graph))
    if in_which_traced(precision) == graph.precision or source is None:
        return graph
    model = source.model()
    if source.graph() is not graph or model is None:
        return graph
    return source.again(model, precision=precision)


_FROM_TORCH = (
    RuntimeError, TypeError, ValueError, LookupError, AttributeError, AssertionError,
    SPEC_ERROR,
)  # fmt: skip
"""What torch, or a model's own code, may raise while it is exported."""


def _traced(
    model: nn.Module,
    batch: Mapping[str, torch.Tensor],
    loss_fn: LossFn | None,
    global_batch_size: int | None,
    kernels: Sequence[str | Fusion],
    wins: Wins | None,
    precision: str,
    bags: Mapping[str, GivenBags],
) -> tuple[Graph, bool]:
    """The graph, and whether forward left traces in Python."""
    # Whatever device the caller has new tensors made on: some have kernels that lay out otherwise.
    with (
        rare_collections(),
        explained(),
        torch.device("cpu"),
        fake_mode(),
        undisturbed(model, loss_fn),
        tracing() as calls,
    ):
        captured = capture(
            model, batch, loss_fn, global_batch_size, copies_of(precision), bags
        )  # fmt: skip
        whole = read(captured)
        raw = simplify(whole)
        if scaling_of(precision):
            raw = narrow_products(raw, known_precision(precision))
        check_time()
        raw, fusions = fuse(raw, kernels, wins)
        check_time()
        graph = _graph(raw, captured, model)
        hints = hints_of(marks_of(captured.step.model, calls))
    made = replace(
        graph, hints=hints, fusions=fusions, precision=in_which_traced(precision),
        no_autocast=whole.no_autocast,
    )  # fmt: skip
    return with_routing(made), captured.left_traces


def _bags_of(
    model: nn.Module, batch: Mapping[str, torch.Tensor], loss_fn: LossFn | None
) -> Mapping[str, GivenBags]:
    """The inputs with values in bags that lie where other inputs say. It takes a trace to know,
    as they are, which is made where there may be any."""
    numbers = [x for x in batch.values() if x.ndim == 1 and not x.is_floating_point()]
    if len(numbers) < 2:
        return {}
    graph, _ = _traced(model, batch, loss_fn, None, (), None, "", {})
    return given_bags(graph, cut=False)


def _reason(
    error: Exception,
    model: nn.Module,
    batch: Mapping[str, torch.Tensor],
    loss_fn: LossFn | None,
    global_batch_size: int | None,
) -> Exception:
    """What to raise for an error of torch: one in words if plain calls on fake tensors succeed, or
    if it comes from what forward keeps in Python; the model's own error as it is."""
    size = global_batch_size or next((len(x) for x in batch.values() if x.ndim), 1)
    try:
        compare_calls(model, batch, loss_fn, size)
    except TraceError as found:
        return found
    except NotRun:
        return error
    return not_traced(error)


def _check_names(model: nn.Module, batch: Mapping[str, object]) -> None:
    """TraceError for names that a plan, which is a file, cannot hold."""
    modules = (path for path, _ in model.named_modules(remove_duplicate=False))
    parameters = (path for path, _ in model.named_parameters(remove_duplicate=False))
    for name in (*modules, *parameters, *batch):
        if len(name) > MAX_NAME_CHARS:
            raise TraceError(f"the name {shown(name)} is longer than {MAX_NAME_CHARS} characters")
        if odd := odd_character(name):
            raise TraceError(
                f"the name {shown(name)} has the character {odd}; give it another name: control "
                "characters and what turns or ends lines cannot be in a plan"
            )


def _compare(
    model: nn.Module, batch: Mapping[str, torch.Tensor], loss_fn: LossFn | None, graph: Graph
) -> None:
    try:
        compare_calls(model, batch, loss_fn, graph.batch_size, given_bags(graph))
    except NotRun as error:
        raise TraceError(
            f"{type(model).__name__} keeps something in Python from one call to the next, draws "
            "random numbers there or reads a clock, and whether its calls differ by that cannot be "
            f"told ({error}): leave that out of forward, or keep it in a buffer"
        ) from error


def _own_inputs(model: nn.Module) -> Batch:
    if not is_hf(model):
        raise TraceError(
            f"{type(model).__name__} needs example_inputs: one batch, as a dict of keyword inputs "
            "or a tuple, with loss_fn=... if the model does not return its loss"
        )
    return example_inputs_of(model)


def _graph(raw: Raw, captured: Capture, model: nn.Module) -> Graph:
    if not raw.fakes[raw.loss].requires_grad:
        raise TraceError("the loss does not depend on any parameter that requires grad")
    raw, prelude = prelude_first(raw)
    calls = [(op.inputs, op.outputs) for op in raw.ops]
    tensors = only_reached(calls, raw.tensors | _activations(raw), raw.loss)
    ops, blocks = find_blocks(costed(raw), prelude, tensors, raw.loss)
    by_key = dict(zip(captured.names, raw.inputs, strict=True))
    return Graph(
        tensors=tensors,
        ops=ops,
        prelude=prelude,
        blocks=blocks,
        inputs=tuple(raw.inputs),
        input_names=captured.names,
        loss=raw.loss,
        batch_size=captured.batch_size,
        batch_inputs=tuple(by_key[name] for name in captured.batch_inputs),
        tied=_tied(model),
        fingerprint=_fingerprint(ops, tensors),
    )


def _activations(raw: Raw) -> dict[str, Tensor]:
    return {
        name: Tensor(name, tuple(fake.shape), dtype_name(fake.dtype), Kind.ACTIVATION,
                     requires_grad=fake.requires_grad, channels_last=is_channels_last(fake))
        for op in raw.ops for name in op.outputs if name
        for fake in (raw.fakes[name],)
    }  # fmt: skip


def _tied(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return tuple(tuple(group) for group in names.values() if len(group) > 1)


_SHAPE_ONLY = frozenset("view reshape expand contiguous clone unsqueeze squeeze".split())


def _fingerprint(ops: Sequence[Op], tensors: dict[str, Tensor]) -> str:
    """Hash of the structure; independent of batch size and sequence length.

    Calls that only reshape are left out: whether they do anything depends on the batch size.
    """
    given = [t for t in tensors.values() if t.kind is not Kind.ACTIVATION]
    number = {t.name: f"{t.kind.value} {t.fqn or t.name}" for t in given}
    described: list[object] = []
    for op in ops:
        if op.target.split(".")[1] in _SHAPE_ONLY:
            number[op.outputs[0]] = number[op.inputs[0]]
            continue
        constants = [v for _, v in op.args if isinstance(v, str | bool | float | complex)]
        described.append((op.target, [number[n] for n in op.inputs], constants))
        for index, output in enumerate(op.outputs):
            number[output] = f"{len(described)}.{index}"
    parameters = [(t.fqn, t.shape, t.dtype) for t in tensors.values() if t.kind is Kind.PARAMETER]
    return digest([described, sorted(parameters)])

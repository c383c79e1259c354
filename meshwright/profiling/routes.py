"""Counts which experts of a model's mixtures tokens pick in batches."""

import copy
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.ir.errors import PlanError
from meshwright.ir.graph.expert_form import parse_form
from meshwright.ir.graph.experts import EXPERTS
from meshwright.ir.profile.route_counts import LayerCounts, RouteCounts, counts_of
from meshwright.ir.torch_modes import recording
from meshwright.ir.trace.capture import has_hf_code
from meshwright.ir.trace.declared import use_declared

_OPERATORS = (EXPERTS, torch.ops.meshwright.experts_forward.default)


def count_routes(model: nn.Module, batches: Iterable[Any]) -> RouteCounts:
    """Runs a model forward over batches and counts, for each of its layers of experts, to how many
    ranks tokens go and what the busiest rank gets, however many ranks share out the experts.

    A batch is a tensor, a tuple of arguments or a dict of them, and as large as what a group of
    ranks computes at once: of small batches the busiest rank has more over the mean. Layers are
    those that a trace finds, or that are declared. Parameters are shared with a copy that is run;
    they and the model's buffers stay as they are. PlanError if no layer of experts got a token.
    """
    ran = copy.deepcopy(model, {id(x): x for x in model.parameters()})
    inside: list[str] = []
    for path, module in ran.named_modules():
        module.register_forward_pre_hook(lambda *_, path=path: inside.append(path))
        module.register_forward_hook(lambda *_: _left(inside), always_call=True)
    found: dict[str, LayerCounts] = {}

    def called(func: Any, args: tuple[Any, ...], named: Any, result: Any) -> None:
        if func in _OPERATORS:
            form = args[9] if len(args) > 9 else named.get("form", "")
            counts = _counted(args[1], args[3], parse_form(form).weightless)
            seen = found.get(inside[-1])
            found[inside[-1]] = seen + counts if seen else counts

    for batch in batches:
        named = batch if isinstance(batch, dict) else {}
        given = () if named else batch if isinstance(batch, tuple | list) else (batch,)
        with _as_traced(ran, tuple(named)), torch.no_grad(), recording(called):
            ran(*given, **named)
    found = {path: counts for path, counts in found.items() if counts.reached[1]}
    if not found:
        raise PlanError(
            "no layer of experts ran with a token that is not dropped: are there batches, and "
            "layers that a trace finds, or that are declared (mw.declare_experts)?"
        )
    return RouteCounts(found)


def _left(inside: list[str]) -> None:
    inside.pop()


@contextmanager
def _as_traced(model: nn.Module, names: tuple[str, ...]) -> Iterator[None]:
    """Inside, a copied model's mixtures are one operator each."""
    with ExitStack() as stack:
        use_declared(model)
        if has_hf_code(model):
            from meshwright.ir.trace import hf

            hf.prepare(model)
            stack.enter_context(hf.tracing(names))
        yield


def _counted(index: Tensor, gate_up: Tensor, weightless: int) -> LayerCounts:
    """Of tokens' picks [T, K] among as many experts as there are weights of."""
    experts = len(gate_up)
    here = index.detach().where((index >= 0) & (index < experts), experts)
    picks = torch.zeros(len(index), experts + 1, dtype=torch.bool).scatter_(1, here.cpu(), True)
    return counts_of(picks[:, :experts].numpy(), index.shape[1], weightless)

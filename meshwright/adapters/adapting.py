"""A model whose linear layers get adapters, or lose them into their weights."""

from torch import nn

from meshwright.adapters.adapted_linear import AdaptedLinear
from meshwright.adapters.kinds import adapter_kind
from meshwright.adapters.linears import Patterns, chosen, places
from meshwright.adapters.quantised_linear import QuantisedLinear
from meshwright.ir.errors import PlanError


def adapt(
    model: nn.Module,
    kind: str = "balanced",
    *,
    rank: int = 8,
    alpha: float = 16.0,
    only: Patterns = "*",
    skip: Patterns = (),
    dropout: float = 0.0,
) -> nn.Module:
    """Freezes a model, puts an adapter beside each of its linear layers, plain or quantised, and
    returns the model, which is changed.

    `kind` is a file of `adapters/kinds`: `lora`, `balanced` (Q-BLoRA) or `pooled` (QA-BLoRA, on a
    quantised base). What is added is scaled by `alpha / rank`. `only` and `skip` are module paths,
    their last parts, or patterns: `only=("q_proj", "v_proj")`. PlanError where nothing is named,
    or a layer's shape does not go with the kind.
    """
    adapter_kind(kind)
    if not isinstance(rank, int) or rank < 1:
        near = max(1, int(rank))
        raise PlanError(f"rank is {rank}; it must be a whole number, at least 1; nearest is {near}")
    if not 0.0 < alpha < float("inf"):
        raise PlanError(
            f"alpha is {alpha:g}; what adapters add is scaled by alpha / rank, so it must be "
            f"positive; nearest is the rank, {rank}, which scales by 1"
        )
    if not 0.0 <= dropout < 1.0:
        raise PlanError(f"dropout is {dropout:g}; it must be from 0 up to below 1")
    if any(isinstance(module, AdaptedLinear) for module in model.modules()):
        raise PlanError("the model has adapters already: merge them first, or adapt another copy")
    found = chosen(list(places(model, (QuantisedLinear,))), only, skip, "can have adapters")
    model.requires_grad_(False)
    for place in found:
        try:
            made = AdaptedLinear(place.module, kind, rank, alpha, dropout)
        except PlanError as error:
            raise PlanError(f"{place.path}: {error}; or leave it out by `skip`") from error
        place.put(made.train(place.module.training))
    return model


def merge(model: nn.Module) -> nn.Module:
    """Merges all adapters into the layers that they are beside, and returns the model, which is
    changed. PlanError where a quantised layer does not take one exactly; then none is merged."""
    adapted = [(path, m) for path, m in model.named_modules() if isinstance(m, AdaptedLinear)]
    if not adapted:
        raise PlanError("the model has no adapters to merge")
    for path, module in adapted:
        try:
            module.check_merges()
        except PlanError as error:
            raise PlanError(f"{path}: {error}") from error
    for path, module in adapted:
        parent, _, name = path.rpartition(".")
        model.get_submodule(parent).register_module(name, module.merged())
    return model

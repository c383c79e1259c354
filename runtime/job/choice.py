"""Whether a plan can run the optimizer that the user chose."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import torch
from torch import nn

from meshwright.forms.sync import clips
from meshwright.forms.tried import group_maker
from meshwright.forms.trying import (
    KNOWN,
    Blocks,
    CannotTry,
    Group,
    Make,
    agrees_in_parts,
    blocks,
    reach,
)
from meshwright.forms.updates import Reach, Update, update
from meshwright.ir.errors import PlanError
from meshwright.ir.graph.graph import Graph, Kind
from meshwright.ir.plan.parameters import views_of
from meshwright.ir.plan.plan import Plan
from meshwright.runtime.job.cuts import cuts_of
from meshwright.runtime.stage.stage import StageModule
from meshwright.runtime.step.planned_updates import (
    JoinedOptimizers,
    PlannedUpdates,
    members_of,
)
from meshwright.runtime.step.updates import FormOptimizer

_Group = tuple[type, Group, Make, frozenset[str] | None]
Choice = str | PlannedUpdates | torch.optim.Optimizer | Callable[..., torch.optim.Optimizer]


def check_choice(
    choice: Choice, made: torch.optim.Optimizer, plan: Plan, graph: Graph, model: nn.Module
) -> None:
    """PlanError if ranks hold parts that the optimizer cannot step alone; the same on all ranks.

    `made` is what was made of the choice over the tensors of this rank.
    """
    if isinstance(choice, str):
        make: Make = partial(_by_name, update(choice))
        groups: Iterable[_Group] = [(update(choice).kind, made.defaults, make, None)]
    elif isinstance(choice, PlannedUpdates):
        paths = [t.fqn for t in graph.tensors.values() if t.kind is Kind.PARAMETER]
        groups = [
            (update(name).kind, member.defaults, partial(_by_name, update(name)),
             frozenset(path for path in paths if choice.of(path) == name))
            for name, member in zip(choice.names(), members_of(made), strict=True)
        ]  # fmt: skip
    elif isinstance(choice, JoinedOptimizers):
        groups = [
            group for own, member in zip(choice.members, members_of(made), strict=True)
            for group in _groups(own, member, model)
        ]  # fmt: skip
    else:
        groups = _groups(choice, made, model)
    for kind, settings, maker, names in groups:
        _check_step(kind)
        if plan.world_size > 1:
            _check(kind, settings, maker, names, plan, graph)


def _by_name(form: Update, groups: list[Group]) -> torch.optim.Optimizer:
    return form.make([p for group in groups for p in group["params"]], None, fused=False)


def _groups(
    choice: torch.optim.Optimizer | Callable[..., torch.optim.Optimizer],
    made: torch.optim.Optimizer,
    model: nn.Module,
) -> Iterator[_Group]:
    """Class and settings of each group, what makes the like of it, and its parameters' names; None
    if it has all."""
    if not isinstance(choice, torch.optim.Optimizer):
        yield type(made), made.defaults, choice, None
        return
    kind = type(choice)
    fqns = {id(p): name for name, p in model.named_parameters()}
    for group in choice.param_groups:
        own = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        names = frozenset(fqns[id(p)] for p in group["params"] if id(p) in fqns)
        yield kind, choice.defaults | own, group_maker(choice, own), names


def _check_step(kind: type) -> None:
    """Some compute the loss again inside their step, which a pipeline cannot do for them."""
    closure = inspect.signature(kind.step).parameters.get("closure")  # type: ignore[attr-defined]
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise PlanError(
            f"optimizer {kind.__name__} wants a closure that computes the loss again within its "
            "step, which a job has not: take one that steps from gradients, such as AdamW"
        )


def _check(
    kind: type, settings: Group, make: Make, names: frozenset[str] | None, plan: Plan, graph: Graph
) -> None:
    if issubclass(kind, FormOptimizer):
        return
    cut = next(_cut(plan, graph, names, whole=False), "")
    apart = _apart(plan)
    try:
        found = reach(kind, settings, make)
    except CannotTry as error:
        if not cut and not apart:
            return
        raise PlanError(
            f"optimizer {kind.__name__} could not be tried on small tensors ({error}), so nobody "
            f"knows whether it steps each element by itself, but {cut or apart}; {_KEEPS}"
        ) from error
    if found is Reach.CHANCE:
        raise PlanError(
            f"optimizer {kind.__name__} draws random numbers: what ranks hold in common would go "
            "apart; train on one device, or take one that draws none"
        )
    what = f"a step of optimizer {kind.__name__} depends on {found.value}"
    if found is Reach.BLOCK:
        _check_blocks(what, blocks(kind, settings, make), make, names, plan, graph)
    if found is Reach.PARAMETER:
        cut = next(_cut(plan, graph, names, whole=True), "")
    if found in (Reach.PARAMETER, Reach.GROUP) and cut:
        raise PlanError(f"{what}, but {cut}; {_KEEPS}")
    if found is Reach.GROUP and apart:
        raise PlanError(f"{what}, but {apart}; {_KEEPS}")


_KEEPS = (
    "the nearest legal plan keeps parameters whole: search with the pins zero=0 and tp=1, and "
    "pp=1 if its parameters depend on each other"
)


def _check_blocks(
    what: str, found: Blocks, make: Make, names: frozenset[str] | None, plan: Plan, graph: Graph
) -> None:
    """Rows that begin and end at the borders of blocks are tried as they are."""
    known: dict[tuple[int, ...], bool] = {}
    size = f"{what} ({found.elements} of them)"
    for cut in cuts_of(plan, graph, names):
        if cut.by_owner:
            continue
        if not cut.borders:
            raise PlanError(f"{size}, but {cut.how}; {_KEEPS}")
        if cut.borders not in known:
            known[cut.borders] = agrees_in_parts(make, cut.borders)
        if not known[cut.borders]:
            least = f", or leaves less than {found.least} to a rank" if found.least else ""
            raise PlanError(
                f"{size}, but {cut.how}, at elements {cut.borders[1:-1]}, which cuts through one"
                f"{least}; {_KEEPS}"
            )


def _cut(plan: Plan, graph: Graph, names: frozenset[str] | None, *, whole: bool) -> Iterator[str]:
    """How parameters of these names are split that some rank does not hold whole; `whole`: that no
    rank does."""
    for cut in cuts_of(plan, graph, names):
        if not (whole and cut.by_owner):
            yield cut.how


def _apart(plan: Plan) -> str:
    """Why no rank holds all parameters; empty if each does."""
    return f"{len(plan.stages)} stages hold different parameters" if len(plan.stages) > 1 else ""


def check_parts(made: torch.optim.Optimizer, stages: Iterable[StageModule]) -> None:
    """PlanError if a stage steps its parameters part by part, and the optimizer may notice."""
    known = all(type(m) in KNOWN or isinstance(m, FormOptimizer) for m in members_of(made))
    if not known and any(not stage.sync.whole_updates for stage in stages):
        raise PlanError(
            "the plan steps parameters part by part, as their gradients come, and nobody knows "
            f"whether {type(made).__name__} may be called so: take an optimizer of torch that "
            "steps each element by itself, such as AdamW, or a plan with zero=1 in its place, "
            "which gathers parameters"
        )


def check_clipping(plan: Plan, max_grad_norm: float | None) -> None:
    """PlanError if gradients are to be clipped, and replicas never have the same ones."""
    views = [view for stage in plan.stages for view in views_of(stage) if view.dp > 1]
    odd = [view.sync_form for view in views if not clips(view.sync_form)]
    if max_grad_norm is not None and odd:
        raise PlanError(
            f"max_grad_norm={max_grad_norm:g} limits a norm that all ranks share, and replicas "
            f"have gradients of their own under sync={odd[0]}: train without max_grad_norm, or "
            "without sync"
        )


def check_tensors(made: torch.optim.Optimizer, given: Sequence[nn.Parameter]) -> None:
    """PlanError if the optimizer is not over the tensors that it was given."""
    ours = {id(x) for x in given}
    if any(id(p) not in ours for group in made.param_groups for p in group["params"]):
        raise PlanError(
            f"the callable made a {type(made).__name__} over tensors of its own: it must make one "
            "of the tensors that it is called with, as `lambda params: AdamW(params)` does"
        )

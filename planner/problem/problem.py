"""What a search is given, and what all candidates of it share."""

import difflib
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import torch

from meshwright.costmodel.block.layer_profile import check_devices
from meshwright.costmodel.cost_cache import CostTables
from meshwright.forms.stepping import cut_on_blocks
from meshwright.forms.sync import changes, chosen, has_owners, has_taps
from meshwright.forms.tried import Given, named_update
from meshwright.forms.updates import USUAL, Reach, Update, spoken, update
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.cluster.host import host_of
from meshwright.ir.errors import PlanError
from meshwright.ir.graph.graph import Graph
from meshwright.ir.graph.routed_graph import expert_sizes, with_routing
from meshwright.ir.graph.routing import Routing
from meshwright.ir.memo import Memos
from meshwright.ir.plan.plan import BlockLayout, ModelMesh
from meshwright.ir.precision import check_products, precision_for, stepped_in
from meshwright.ir.profile.profile import Profile
from meshwright.ir.profile.route_counts import RouteCounts
from meshwright.ir.profile.row_counts import RowCounts
from meshwright.ir.styles import check_style
from meshwright.ir.styles import style as known_style
from meshwright.ir.trace.changing import shared
from meshwright.ir.trace.trace import in_precision
from meshwright.planner.inside.data_layout import DataLayout, solve_data
from meshwright.planner.inside.explain import batch_coupling, batch_norms
from meshwright.planner.inside.variants import MeshVariants
from meshwright.planner.pins.constraints import (
    EVERYWHERE,
    Constraint,
    OnStage,
    Pin,
    Placed,
    StageDevices,
    StageMesh,
    StageShares,
    memory_cap,
    parse_constraints,
    placement_rules,
    stage_of_block,
)
from meshwright.planner.pins.hints import hint_constraints
from meshwright.planner.pins.known import DECISIONS
from meshwright.planner.pins.parameter_pins import ParametersAs
from meshwright.planner.problem.narrow_experts import check_experts
from meshwright.planner.problem.profiles import check_profile
from meshwright.planner.problem.vocabulary import check_vocabulary
from meshwright.planner.search.objectives import check_objective
from meshwright.planner.strategies import found_by_trying


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One graph on one cluster. Costs and layouts are kept once computed."""

    graph: Graph
    cluster: Cluster
    optimizer: str
    precision: str
    """A file of `ir/precision`."""
    max_grad_norm: float | None
    constraints: tuple[Constraint, ...]
    objective: str
    seed: int
    allow: frozenset[str]
    """What of plain training plans may change."""
    rows: RowCounts | None = field(compare=False)
    """How often rows of embedding tables occur."""
    routing: tuple[Routing, ...] = ()
    """Of layers of experts that somebody has counted, or assumed something of."""
    tables: CostTables = field(compare=False, repr=False)
    solved: dict[tuple[ModelMesh, str], tuple[BlockLayout, ...]] = field(compare=False, repr=False)
    laid: dict[tuple[ModelMesh, str], MeshVariants] = field(
        compare=False, repr=False, default_factory=dict
    )
    memos: Memos = field(compare=False, repr=False, default_factory=Memos)
    """Shared by problems that differ in constraints alone: what depends on them is kept by them."""

    memory_headroom: float = 0.0
    """The share of a device's memory that stays free, where no pin says what may be used."""
    log_dir: Path | None = field(compare=False, default=None)
    """Where a searcher that trains writes how that goes."""

    @cached_property
    def forms(self) -> tuple[str, ...]:
        """Forms of synchronisation that stages may name."""
        return () if self.tables.facts.precision.scales_loss else chosen()

    @property
    def batch(self) -> int:
        """Global batch size."""
        return self.graph.batch_size

    def variants(self, model: ModelMesh) -> tuple[str, ...]:
        """Names of the ways to lay out all patterns on a model mesh, the usual one first."""
        return self._on(model).names

    def layouts(self, model: ModelMesh, variant: str = "") -> tuple[BlockLayout, ...]:
        """One layout per pattern, `(prelude)` included."""
        key = (model, f"{variant}{self._placed}")
        if key not in self.solved:
            self.solved[key] = self._on(model).found(variant).layouts
        return self.solved[key]

    def keep_layouts(
        self, model: ModelMesh, variant: str, layouts: tuple[BlockLayout, ...]
    ) -> None:
        """Adds a variant that a searcher has made itself."""
        self.solved[model, f"{variant}{self._placed}"] = layouts

    def _on(self, model: ModelMesh) -> MeshVariants:
        key = (model, self._placed)
        if key not in self.laid:
            asked = placement_rules(self.constraints, self.graph)
            self.laid[key] = MeshVariants(
                self.graph, self.tables, self.optimizer, self.data, model, asked
            )
        return self.laid[key]

    @cached_property
    def data(self) -> DataLayout:
        """How samples are split, on all meshes alike."""
        return solve_data(self.graph)

    @cached_property
    def _placed(self) -> str:
        """Problems that differ in other constraints alone share layouts."""
        return "".join(f" {item}" for item in self.constraints if isinstance(item, Placed))

    @cached_property
    def coupling(self) -> tuple[str, ...]:
        """Why more than one micro-batch would change the result; empty if it would not."""
        return (*self.mixing, *batch_norms(self.graph))

    @cached_property
    def mixing(self) -> tuple[str, ...]:
        """Of that, what ops of blocks need of other samples, their sums too: replicas that train
        together have it only where the batch is in one piece."""
        return batch_coupling(self.graph, self.layouts(()))

    @cached_property
    def meeting(self) -> tuple[str, ...]:
        """Ops that need values of other samples, and not only sums over them, with why."""
        return batch_coupling(self.graph, self.layouts(()), sums=False)

    def room_bytes(self, devices: tuple[int, ...]) -> int:
        """Memory that a plan may use on each of `devices`."""
        usable = self.usable_bytes(devices)
        cap = memory_cap(self.constraints)
        return int(usable * (1 - self.memory_headroom)) if cap is None else min(cap, usable)

    def usable_bytes(self, devices: tuple[int, ...]) -> int:
        """Memory that each of `devices` has for a job."""
        return min(device.usable_bytes for device in self.cluster.types_of(devices))

    def host_bytes(self, devices: tuple[int, ...]) -> int:
        """Memory of the host that a plan may use for each of `devices`; where that is the device's
        own, that counts."""
        found = [host_of(self.cluster, device) for device in self.cluster.types_of(devices)]
        return min([host.memory_bytes for host in found if host], default=2**60)

    @cached_property
    def tried(self) -> tuple[str, ...]:
        """Operators whose rules were found by trying."""
        return found_by_trying(self.graph)

    @property
    def stage_of_block(self) -> dict[int, int]:
        return stage_of_block(self.constraints, self.graph)


def make_problem(
    graph: Graph,
    cluster: Cluster,
    *,
    optimizer: Given = USUAL,
    precision: str = "",
    max_grad_norm: float | None = None,
    constraints: tuple[str | Constraint, ...] = (),
    objective: str = "throughput",
    seed: int = 0,
    allow: tuple[str, ...] = (),
    rows: RowCounts | None = None,
    routes: RouteCounts | None = None,
    profile: Profile | None = None,
    log_dir: Path | None = None,
    style: str = "",
    memory_headroom: float = 0.0,
) -> Problem:
    """The problem, after checking what was asked. `precision`: that of the graph if not given;
    `optimizer`: a key, or what is tried for what it costs; `style`: the stack that it is for."""
    check_style(style)
    if max_grad_norm is not None and not 0.0 < max_grad_norm < float("inf"):
        raise PlanError(f"max_grad_norm is {max_grad_norm}; it must be positive, such as 1.0")
    if profile is not None:
        check_profile(profile, cluster)
    if not graph.blocks:
        raise PlanError("the model has no block to place: no op depends on a parameter")
    if precision:
        graph = in_precision(graph, precision)
    precision = precision_for(graph, precision)
    check_products(precision, cluster)
    routing = _routing(graph, routes)
    graph = with_routing(graph, routing)
    optimizer = _named(optimizer, graph, precision)
    check_objective(objective, cluster)
    check_devices(graph, cluster.device_names)
    check_vocabulary(graph, style)
    check_experts(graph, cluster, style)
    asked = parse_constraints((*constraints, *hint_constraints(graph)), graph, cluster)
    asked = (*asked, *_of_style(style, asked, graph, cluster))
    if shared(graph) and not any(map(_names_stages, asked)):
        asked = _with(asked, ("pp=1",), "each stage would have a buffer of its own", graph, cluster)
    _check_steps(optimizer, asked, graph)
    if whole := _held_whole(update(optimizer), asked, graph, cluster):
        asked = _with(asked, whole, _looks_at(optimizer), graph, cluster)
    elif owned := [item for item in asked if _steps_whole(item)]:
        why = f"'{owned[0]}' steps whole parameters"
        asked = _with(asked, (_WHOLE_MATRICES,), why, graph, cluster)
    if tapped := [item for item in asked if _has_taps(item)]:
        asked = _with(asked, _WHOLE_LAYERS, f"'{tapped[0]}' looks at whole layers", graph, cluster)
    return Problem(
        graph=graph, cluster=cluster, optimizer=optimizer, precision=precision,
        max_grad_norm=max_grad_norm, constraints=asked, objective=objective, seed=seed,
        allow=_allowed(allow), rows=rows, routing=routing,
        tables=CostTables(graph, cluster, precision, profile=profile, style=style),
        solved={}, log_dir=log_dir, memory_headroom=memory_headroom,
    )  # fmt: skip


def _routing(graph: Graph, routes: RouteCounts | None) -> tuple[Routing, ...]:
    """Of the kinds of layers that the model has; PlanError where nothing counted is of one."""
    if routes is None:
        return ()
    sizes = sorted({size for op in graph.ops if (size := expert_sizes(op, graph))})
    found = {size: routes.routing(*size) for size in sizes}
    if unknown := [size for size, one in found.items() if one is None] or not sizes:
        raise PlanError(
            f"routes: they tell of layers of (experts, picked, beside them without weights) "
            f"{routes.sizes}, the model has {unknown if sizes else 'none'}; count them with "
            "mw.count_routes(model, batches)"
        )
    return tuple(one for one in found.values() if one)


def _of_style(
    name: str, asked: tuple[Constraint, ...], graph: Graph, cluster: Cluster
) -> tuple[Constraint, ...]:
    """What the stack has no choice of, where the user says nothing else."""
    said = {item.name for item in asked if isinstance(item, Pin)}
    pins = parse_constraints(known_style(name).pins, graph, cluster)
    return tuple(item for item in pins if not (isinstance(item, Pin) and item.name in said))


def _allowed(allow: tuple[str, ...]) -> frozenset[str]:
    known = tuple(sorted({changes(form) for form in chosen()} - {""}))
    for word in allow:
        if word not in known:
            raise _unknown("allow", word, known)
    return frozenset(allow)


_WHOLE: dict[Reach, tuple[str, ...]] = {
    Reach.ELEMENT: (),
    Reach.BLOCK: ("model=1",),
    Reach.PARAMETER: ("zero=0", "model=1"),
    Reach.GROUP: ("zero=0", "model=1", "pp=1"),
    Reach.CHANCE: ("dp=1", "model=1", "pp=1"),
}
"""Pins under which ranks hold all that a step of one element looks at."""


def _with(
    asked: tuple[Constraint, ...], pins: tuple[str, ...], because: str, graph: Graph,
    cluster: Cluster,
) -> tuple[Constraint, ...]:  # fmt: skip
    """Constraints and pins of ours, which say why."""
    own = [
        replace(pin, because=because) if isinstance(pin, Pin) else pin
        for pin in parse_constraints(pins, graph, cluster)
    ]
    return parse_constraints((*asked, *own), graph, cluster)


def _looks_at(optimizer: str) -> str:
    reach = update(optimizer).reach
    owners = (
        "; 'parameters PATTERN sync=by_owner,zero=1' gives matrices an owner each"
        if reach is Reach.PARAMETER else ""
    )  # fmt: skip
    return f"a step of {spoken(optimizer)} depends on {reach.value}{owners}"


def _check_steps(optimizer: str, asked: tuple[Constraint, ...], graph: Graph) -> None:
    """PlanError if it does not step parameters of a shape that the model has, and no pin says what
    else does."""
    form, trained = update(optimizer), _trained(graph)
    stepped = {
        path for item in asked if isinstance(item, ParametersAs) and item.choice.update
        for path in item.named(trained)
    }  # fmt: skip
    for path, shape in trained.items():
        if path not in stepped and not form.takes(shape):
            raise PlanError(
                f"optimizer {spoken(optimizer)} steps parameters of "
                f"{' or '.join(map(str, form.dims))} dims, and {path} has shape {list(shape)}; "
                f"nearest: the pin 'parameters {path} update=adamw', or optimizer 'adamw' and "
                f"'parameters PATTERN update={spoken(optimizer)}' of others"
            )


def _held_whole(
    form: Update, asked: tuple[Constraint, ...], graph: Graph, cluster: Cluster
) -> tuple[str, ...]:
    """Pins under which ranks hold what a step of one element looks at."""
    found = _WHOLE[form.reach]
    if form.reach is Reach.PARAMETER and any(map(_gives_owners, asked)):
        return (_WHOLE_MATRICES,)  # whoever steps a parameter has it whole
    if form.reach is Reach.BLOCK:
        most = len(cluster.device_names)
        counts = [n for n in range(2, most + 1) if most % n == 0]
        shapes = _trained(graph).values()
        if not all(cut_on_blocks(form, shape, n) for shape in shapes for n in counts):
            return (*found, "zero=0")
    return found


def _gives_owners(asked: Constraint) -> bool:
    """Whether the user has all parameters stepped whole, each by an owner."""
    return isinstance(asked, Pin) and asked.scope == EVERYWHERE and asked.value in has_owners()


def _trained(graph: Graph) -> dict[str, tuple[int, ...]]:
    return {x.fqn: tuple(x.shape) for x in graph.parameters if x.requires_grad}


def _named(given: Given, graph: Graph, precision: str) -> str:
    """The key of what steps parameters, or what trying it has found."""
    if isinstance(given, str):
        update(given)  # refuses one that is not known
        return given
    dtypes = [stepped_in(precision, x) for x in graph.parameters if x.requires_grad]
    usual = max(set(dtypes), key=dtypes.count, default="float32")
    return named_update(given, _trained(graph), getattr(torch, usual))


_WHOLE_MATRICES = "model=1"
"""The pin under which ranks hold whole parameters, if only those of some patterns are to be so."""


def _steps_whole(asked: Constraint) -> bool:
    """Whether the user has some parameters stepped by what looks at whole ones."""
    if not isinstance(asked, ParametersAs) or not asked.choice.update:
        return False
    return update(asked.choice.update).reach is Reach.PARAMETER


_WHOLE_LAYERS = ("model=1", "pp=1")
"""Where layers are looked at as a whole, and all of them together."""


def _has_taps(asked: Constraint) -> bool:
    """Whether the user asks for a method that looks at what layers read."""
    if isinstance(asked, ParametersAs):
        return asked.choice.sync is not None and has_taps(asked.choice.sync.form)
    if not isinstance(asked, Pin) or isinstance(asked.value, tuple):
        return False
    return asked.value in chosen() and has_taps(str(asked.value))


def _names_stages(asked: Constraint) -> bool:
    """Whether the user says something of pipeline stages."""
    staged = isinstance(asked, OnStage | StageDevices | StageMesh | StageShares)
    return staged or (isinstance(asked, Pin) and DECISIONS[asked.name].of_stages)


def _unknown(what: str, given: str, known: tuple[str, ...]) -> PlanError:
    near = difflib.get_close_matches(given, known, 1, 0.0)[0]
    return PlanError(f"{what} {given!r} is none of {', '.join(known)}; nearest is {near!r}")

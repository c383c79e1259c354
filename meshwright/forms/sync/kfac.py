"""K-FAC whose layers have owners: MPD-KFAC's factors with KAISA's least memory (Shi et al. 2021,
Pauloski et al. 2021).

Each rank sums the Kronecker factors of linear layers and convolutions over its own samples. A
layer's owner among the ranks of dp_shard gets the sums of all, keeps running means and inverses,
preconditions the layer's gradient with them, steps its parameters and hands these on. Nobody else
has factors. Parameters of the group that belong to no such layer are stepped by owners as they are.

The gradient that is preconditioned is that of the mean loss over all samples, and factors are those
of all samples: what comes out does not depend on the number of ranks.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from math import prod, sqrt
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.forms.exchange import Event, Exchange, Hold, Rewrite, Row, Send, Shaped
from meshwright.forms.factors import FactorRules, LayerFactors, Tapped, Window
from meshwright.forms.flat import (
    BUCKET_BYTES,
    ShardedOptimizer,
    buckets,
    sum_over_copies,
    trainable,
)
from meshwright.forms.owner_bucket import OwnerBucket
from meshwright.forms.placing import MatrixTask, placed
from meshwright.forms.running import Lines, ParameterStore, Samples, Slot, SyncRun, SyncState
from meshwright.forms.settings import FormSettings, Known, Number, wrong_settings
from meshwright.forms.sync import zero1
from meshwright.ir.comm.collective import What
from meshwright.ir.errors import PlanError
from meshwright.ir.graph.graph import Graph
from meshwright.ir.layers import window_of
from meshwright.ir.layout.conversions import Primitive
from meshwright.ir.plan.plan import Plan, Setting, Stage
from meshwright.ir.torch_private import reduce_scatter_uneven

EXACT = False
CHANGES = "second_order"
SHAPES = SHARDS = OWNERS = TAPS = True
SEARCHED = False
GIVES_UP = (
    "gradients of linear layers and convolutions are preconditioned by K-FAC: steps are not those "
    "of the optimizer alone"
)
_SETTINGS: Known = {
    "damping": Number(1e-3, 1e-12, 1e6), "factor_decay": Number(0.95, 0.0, 1.0),
    "kl_clip": Number(1e-3, 0.0, 1e6), "lr": Number(0.1, 0.0, 1e6),
    "factor_update_steps": Number(1, 1, 2**30), "inv_update_steps": Number(1, 1, 2**30),
}  # fmt: skip
"""Users' names of them; `kl_clip` 0: no limit. `lr` is that of the limit."""


def describe(
    replicas: int,
    zero: int = 1,
    settings: Mapping[str, Setting] = MappingProxyType({}),
    shapes: Sequence[Shaped] = (),
    shards: int = 0,
) -> Exchange:
    """Returns what is held, computed and sent; that of a step on average, where factors and
    inverses are not made in all."""
    made: Exchange = zero1.describe(replicas)
    ranks = shards or replicas
    found = _Layers([shape for shape, _ in shapes])
    nbytes = sum([size for _, size in shapes])
    if not found.layers or not nbytes:
        return Exchange(made.rows, largest=1 / ranks, busiest=1 / ranks)
    told = FormSettings(_SETTINGS, settings)
    every, inverted = told.whole("factor_update_steps"), told.whole("inv_update_steps")
    owners = found.owners(ranks)
    values = nbytes / sum([prod(shape) for shape, _ in shapes])
    sums = [c * c + o * o for c, o in found.layers]
    sent = sum([(x + c + o) / 2 + 2 for x, (c, o) in zip(sums, found.layers, strict=True)])
    numels = [float(prod(shape)) for shape, _ in shapes]
    largest = _most(found.per_shape(owners), numels, ranks)
    own = [0.0] * ranks
    flops = [0.0] * ranks
    for owner, square, (c, o) in zip(owners, sums, found.layers, strict=False):
        own[owner] += 2.0 * square  # means and inverses
        flops[owner] += 2.0 * (c**3 + o**3) / inverted + 2.0 * (o * o * c + o * c * c)
    stated = {
        "factors": sent * values / nbytes / every,
        "kept": (sum(sums) + max(own)) * values / nbytes,
        # What goes, what an owner gets of it, and of one other rank at a time; or parameters.
        "moving": max(sent * (1 + max(own) / sum(sums)) * values / nbytes, 1 + largest),
    }
    rows: list[Row] = [
        *[row for row in made.rows if not (isinstance(row, Hold) and row.kind == "communication")],
        Send(what="gradients", primitive=Primitive.REDUCE_SCATTER, axis="dp_shard", unit="bucket",
             at=Event.END, until=Event.END, share="factors"),
        Rewrite(what="gradients", unit="bucket", at=Event.END, moved=3 * stated["factors"],
                flops=max(flops) / nbytes, calls=10 * len(sums) / len(shapes)),
        Hold(kind="kept", since=Event.BEGIN, until=Event.NEXT_BEGIN, whole=1, share="kept"),
        Hold(kind="communication", unit="bucket", since=Event.END, until=Event.END, whole=1,
             share="moving"),
    ]  # fmt: skip
    return Exchange(
        tuple(rows), largest=largest, busiest=max(flops) / sum(flops), stated=stated
    )  # fmt: skip


class _Layers:
    """Layers among parameters in order: a weight, and the vector after it if that has as many
    values as the weight has rows."""

    def __init__(self, shapes: Sequence[tuple[int, ...]]) -> None:
        self.layers: list[tuple[int, int]] = []
        """(columns, rows) of each."""
        self._others: list[float] = []
        self._of: list[tuple[bool, int]] = []
        """Of each parameter: whether it is of a layer, and number of that or of the others."""
        for shape in shapes:
            if len(shape) in (2, 4):
                self._of.append((True, len(self.layers)))
                self.layers.append((prod(shape[1:]), shape[0]))
            elif self._of and self._of[-1][0] and shape == (self.layers[-1][1],):
                columns, rows = self.layers[-1]
                self._of.append((True, len(self.layers) - 1))
                self.layers[-1] = columns + 1, rows
            else:
                self._of.append((False, len(self._others)))
                self._others.append(float(prod(shape)))

    def owners(self, ranks: int) -> tuple[int, ...]:
        """Of all layers, then of the other parameters."""
        return _owners(self.layers, self._others, ranks)

    def per_shape(self, owners: Sequence[int]) -> list[int]:
        """Owner of each parameter."""
        return [owners[i if layer else len(self.layers) + i] for layer, i in self._of]


def _owners(
    layers: Sequence[tuple[int, int]], others: Sequence[float], ranks: int
) -> tuple[int, ...]:
    tasks = [MatrixTask(float(c) ** 3 + float(o) ** 3) for c, o in layers]
    return placed([*tasks, *map(MatrixTask, others)], ranks).of


def _most(owners: Sequence[int], sizes: Sequence[float], ranks: int) -> float:
    """The share of the rank that has most."""
    sums = [0.0] * ranks
    for owner, size in zip(owners, sizes, strict=True):
        sums[owner] += size
    return max(sums) / sum(sums)


def check(stage: Stage) -> Iterator[tuple[str, str]]:
    """Yields what is wrong with the form in a stage, and what would be right."""
    yield from wrong_settings("kfac", _SETTINGS, stage.sync.settings if stage.sync else {})
    if stage.zero != 1:
        yield f"kfac leaves layers to owners, and zero is {stage.zero}", "zero 1"
    elif stage.dp > 1 and not stage.is_sharded:
        yield "kfac shares layers out over dp_shard, which is 1", f"dp_shard {stage.dp}"
    hidden = {
        "compile": stage.compile, "overlap": stage.overlap != "none", "saved": bool(stage.saved),
    }  # fmt: skip
    for key, hides in hidden.items():
        if hides:
            yield f"kfac sees what layers read in their backward, which {key} changes", f"no {key}"
    for axis, ranks in stage.model:
        if ranks > 1:
            yield f"kfac has whole layers, and {axis} {ranks} splits what they read", f"{axis} 1"


def check_parameters(
    plan: Plan, graph: Graph, index: int, stage: Stage, paths: Sequence[str]
) -> Iterator[tuple[str, str]]:
    """Yields weights that something else than a layer reads, limits that no rank knows, and stages
    without replicas, where no form runs."""
    if stage.dp == 1:
        yield "kfac runs among replicas, and there is one: its steps would be plain", "dp_shard 2"
    told = FormSettings(_SETTINGS, stage.sync.settings if stage.sync else {})
    if len(plan.stages) > 1 and told.number("kl_clip"):
        yield "kl_clip limits the step of all layers, and stages have different ones", "kl_clip 0"
    fits = dict[str, bool]()
    for block in plan.stage_blocks(graph, index):
        for op in graph.block_ops(block):
            settings = [value for _, value in op.args[3:]]
            layer = window_of(op.target, settings) is not None
            for at, name in enumerate(op.inputs):
                tensor = graph.tensors[name]
                if len(tensor.shape) > 1 and tensor.fqn in paths:
                    fits[tensor.fqn] = fits.get(tensor.fqn, True) and layer and at == 1
    for path, is_layer in fits.items():
        if not is_layer or len(_shape_of(graph, path)) not in (2, 4):
            yield (
                "kfac preconditions linear layers and convolutions of images without groups, and "
                f"something else reads {path}",
                f"patterns that leave {path} out",
            )
            return


def _shape_of(graph: Graph, path: str) -> tuple[int, ...]:
    return next(tuple(x.shape) for x in graph.tensors.values() if x.fqn == path)


def build(slots: Sequence[Slot], lines: Lines, stage: Stage, store: ParameterStore) -> SyncRun:
    """Returns what runs the form in a stage."""
    layers, others = _found(trainable(slots))
    found = _owners(
        [(x.columns, x.out) for x in layers],
        [float(slot.whole.numel()) for slot in others], lines.shards.size,
    )  # fmt: skip
    owners = dict(zip(others, found[len(layers) :], strict=True))
    for layer, owner in zip(layers, found, strict=False):
        owners[layer.weight] = owner
        if layer.bias is not None:
            owners[layer.bias] = owner
    told = FormSettings(_SETTINGS, stage.sync.settings if stage.sync else {})
    by_owner = sorted(zip(layers, found, strict=False), key=lambda pair: pair[1])
    return _Preconditioned(slots, lines, owners, by_owner, told)


def _found(slots: Sequence[Slot]) -> tuple[list[LayerFactors], list[Slot]]:
    """Layers, each with its bias if that is there, and other parameters."""
    by_path = {slot.param.fqn: slot for slot in slots}
    layers, taken = [], set[Slot]()
    for slot in slots:
        if slot.whole.ndim in (2, 4):
            bias = by_path.get(slot.param.fqn.removesuffix("weight") + "bias")
            if bias is not None and tuple(bias.whole.shape) != (slot.whole.shape[0],):
                bias = None
            layers.append(LayerFactors(slot, bias))
            taken |= {slot} if bias is None else {slot, bias}
    return layers, [slot for slot in slots if slot not in taken]


class _Preconditioned(ShardedOptimizer):
    def __init__(
        self,
        slots: Sequence[Slot],
        lines: Lines,
        owners: Mapping[Slot, int],
        layers: Sequence[tuple[LayerFactors, int]],
        told: FormSettings,
    ) -> None:
        groups = buckets(trainable(slots), BUCKET_BYTES)
        super().__init__(slots, groups, lines, partial(OwnerBucket, owners=owners))
        self._layers = [layer for layer, _ in layers]
        self._by_path = {layer.path: layer for layer in self._layers}
        own = lines.shards.coordinate
        self._mine = [layer for layer, owner in layers if owner == own]
        self._messages = []
        """Per bucket: its layers, owner by owner, and values for each rank."""
        for bucket in self._buckets:
            inside = [(layer, owner) for layer, owner in layers if layer.weight in bucket.slots]
            sizes = [
                sum([layer.size for layer, owner in inside if owner == rank])
                for rank in range(lines.shards.size)
            ]
            self._messages.append(([layer for layer, _ in inside], sizes))
        pairs = zip(self._buckets, self._shards, strict=True)
        self._shard_of = {s: x for b, xs in pairs for s, x in zip(b.slots, xs, strict=True)}
        self._rules = FactorRules(told.number("damping"), told.number("factor_decay"))
        self._clip, self._lr = told.number("kl_clip"), told.number("lr")
        self._every = told.whole("factor_update_steps")
        self._inverted = told.whole("inv_update_steps")
        self._steps = 0
        self._sees = False

    @property
    def _wants_factors(self) -> bool:
        return self._steps % self._every == 0

    def begin(self, batch: Samples | None = None, next_batch: Samples | None = None) -> None:
        super().begin(batch, next_batch)
        self._sees = self._wants_factors
        for layer in self._layers if self._sees else ():
            layer.clear()

    def tap(self, path: str, made: Tensor, read: Tensor, window: Window) -> Tensor:
        layer = self._by_path.get(path)
        if layer is None or not self._sees or not (torch.is_grad_enabled() and made.requires_grad):
            return made
        seen = partial(_see, layer, window)
        found: Tensor = Tapped.apply(made, read, seen)  # type: ignore[no-untyped-call]
        return found

    @torch.no_grad()
    def finish(self) -> None:
        super().finish()
        if self._sees:
            self._sum_factors()
        if self._steps % self._inverted == 0:
            for layer in self._mine:
                layer.invert(self._rules)
        self._precondition()
        self._steps += 1
        self._sees = False

    def _sum_factors(self) -> None:
        """Owners get the sums of what all have seen."""
        for layers, sizes in self._messages:
            if layers:
                self._sum_of(layers, sizes)

    def _sum_of(self, layers: Sequence[LayerFactors], sizes: Sequence[int]) -> None:
        peers = self._lines.shards
        flat = layers[0].read.new_empty(sum(sizes))
        parts = torch.split(flat, [layer.size for layer in layers])
        for layer, part in zip(layers, parts, strict=True):
            layer.pack(part)
        mine = flat.new_empty(sizes[peers.coordinate])
        what = What("gradients", self._lines.stage, peers.axis, "reduce_scatter", flat.nbytes,
                    peers.size)  # fmt: skip
        start = self._lines.recorder.mark()
        work = reduce_scatter_uneven(mine, flat, sizes, peers.group)
        self._lines.recorder.pending(what, work, start).wait()
        del flat, parts, part, work
        sum_over_copies(mine, self._lines)
        own = [layer for layer in layers if layer in self._mine]
        found = torch.split(mine, [layer.size for layer in own])
        for layer, part in zip(own, found, strict=True):
            if not layer.take(part, self._rules):
                raise PlanError(
                    f"kfac preconditions linear layers and convolutions without groups, and none "
                    f"reads {layer.path}: leave it out of the parameters that kfac has"
                )

    def _precondition(self) -> None:
        """Gradients of this rank's layers become what their factors make of them."""
        made: list[tuple[Tensor, Tensor]] = []
        for layer in self._mine:
            weight = self._shard_of[layer.weight].grad
            bias = self._shard_of[layer.bias].grad if layer.bias is not None else None
            assert weight is not None
            new, new_bias = layer.precondition(weight, bias)
            made.append((weight, new))
            if bias is not None and new_bias is not None:
                made.append((bias, new_bias))
        scale = self._scale(made)
        for gradient, new in made:
            gradient.copy_(new * scale)

    def _scale(self, made: Sequence[tuple[Tensor, Tensor]]) -> float:
        """By which steps are made shorter, so that they are no longer than `kl_clip` allows."""
        if not self._clip:
            return 1.0
        total = torch.zeros((), dtype=torch.float64)
        for gradient, new in made:
            total += float((gradient * new).sum()) * self._lr**2
        peers = self._lines.shards
        if peers.group is not None:
            total = total.to(self._layers[0].read.device if self._layers else "cpu")
            what = What("gradients", self._lines.stage, peers.axis, "all_reduce", total.nbytes,
                        peers.size)  # fmt: skip
            with self._lines.recorder.collective(what):
                dist.all_reduce(total, group=peers.group)
        found = abs(float(total))
        return min(1.0, sqrt(self._clip / found)) if found else 1.0

    @property
    def kept(self) -> list[Tensor]:
        seen = [x for layer in self._layers for x in (layer.read, layer.gradients)]
        return seen + [x for y in self._mine for x in (*(y.means or ()), *(y.inverses or ()))]

    def state(self) -> SyncState:
        if not self._steps:
            return {}
        found: dict[str, object] = {"steps": self._steps}
        for layer in self._mine:
            for name, pair in (("mean", layer.means), ("inverse", layer.inverses)):
                for number, x in enumerate(pair or ()):
                    found[f"{name} {number} {layer.path}"] = x.clone()
        return found

    def load(self, state: SyncState) -> None:
        self._steps = int(state.get("steps", 0))
        for layer in self._mine:
            pairs = [
                tuple(state[f"{name} {n} {layer.path}"].clone() for n in (0, 1))
                if f"{name} 0 {layer.path}" in state else None
                for name in ("mean", "inverse")
            ]  # fmt: skip
            layer.means, layer.inverses = pairs


def _see(layer: LayerFactors, window: Window, read: Tensor, gradient: Tensor) -> None:
    layer.see(read, gradient, window)

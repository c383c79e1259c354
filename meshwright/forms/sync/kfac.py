"""K-FAC whose layers have owners (Martens and Grosse 2015; D-KFAC and SPD-KFAC: Shi et al. 2021;
KAISA: Pauloski et al. 2021).

Each rank sums the Kronecker factors of linear layers and convolutions over its own samples: of what
they read as it runs forward, of gradients as it runs backward. Sums go as soon as they are whole,
upper triangles of a bucket's layers together.

With zero 1 or 2 a layer's owner among the ranks of dp_shard gets the sums of all, keeps running
means and bases (inverses, or eigenvectors), preconditions the layer's gradient, steps its
parameters and hands these on. Nobody else has more than sums. There is such an owner in each copy
of the shards: one of them makes a base and sends it to the others, or all make it. With zero 0 all
ranks precondition all layers and send only bases. So KAISA's fraction of gradient workers is
1 / dp_shard: 1 with zero 0 (COMM-OPT), least with dp_replicate 1 (MEM-OPT).

The gradient that is preconditioned is that of the mean loss over all samples, and factors are those
of all samples: what comes out does not depend on the number of ranks.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType

from meshwright.forms.exchange import Exchange
from meshwright.forms.exchange_rows import Shaped
from meshwright.forms.factors import LayerFactors
from meshwright.forms.flat import BUCKET_BYTES, ShardedOptimizer, buckets, trainable
from meshwright.forms.kfac_layout import SETTINGS, KfacSettings, layer_owners
from meshwright.forms.kfac_price import priced
from meshwright.forms.kfac_run import KfacRun
from meshwright.forms.owner_bucket import OwnerBucket
from meshwright.forms.running import Lines, ParameterStore, Slot, SyncRun
from meshwright.forms.settings import wrong_settings
from meshwright.forms.sync import zero0, zero1, zero2
from meshwright.ir.graph.graph import Graph
from meshwright.ir.layers import window_of
from meshwright.ir.plan.paired import paired_stages
from meshwright.ir.plan.plan import Plan, Setting, Stage

EXACT = False
CHANGES = "second_order"
SHAPES = SHARDS = OWNERS = TAPS = True
SEARCHED = False
GIVES_UP = (
    "gradients of linear layers and convolutions are preconditioned by K-FAC: steps are not those "
    "of the optimizer alone"
)
_LEVELS = {0: zero0, 1: zero1, 2: zero2}
"""How gradients are summed: what is at owners goes when it goes where rows are shared out."""


def describe(
    replicas: int,
    zero: int = 1,
    settings: Mapping[str, Setting] = MappingProxyType({}),
    shapes: Sequence[Shaped] = (),
    shards: int = 0,
) -> Exchange:
    """Returns what is held, computed and sent; that of a step on average, where factors and bases
    are not made in all."""
    made: Exchange = _LEVELS.get(zero, zero1).describe(replicas)
    shared_out = bool(zero) and replicas > 1
    ranks = (shards or replicas) if shared_out else 1
    return priced(made, KfacSettings.of(settings), shapes, ranks, replicas // ranks, shared_out)


def work_tries(message: float, value: float) -> tuple[Mapping[str, Setting], ...]:
    """Returns what ranks that precondition the same layers may send each other: bases, each of
    which one makes; nothing; or what takes less, by the cost of messages."""
    cheapest: Mapping[str, Setting] = {
        "sends": "cheapest",
        "message": float(round(message)),
        "value": round(value, 2),
    }
    return {"sends": "bases"}, {"sends": "nothing"}, cheapest


def check(stage: Stage) -> Iterator[tuple[str, str]]:
    """Yields what is wrong with the form in a stage, and what would be right."""
    yield from wrong_settings("kfac", SETTINGS, stage.sync.settings if stage.sync else {})
    if stage.zero not in _LEVELS:
        yield f"kfac keeps parameters whole, and zero is {stage.zero}", "zero 2"
    elif stage.zero and stage.dp > 1 and not stage.is_sharded:
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
    if index in paired_stages(plan):
        yield (
            "kfac sees what layers read in their backward, which pairs of actions change",
            "schedule one_f_one_b",
        )
    if stage.dp == 1:
        yield "kfac runs among replicas, and there is one: its steps would be plain", "dp_shard 2"
    told = KfacSettings.of(stage.sync.settings if stage.sync else {})
    if len(plan.stages) > 1 and told.clips:
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
    told = KfacSettings.of(stage.sync.settings if stage.sync else {})
    layers, others = _found(trainable(slots))
    if not stage.zero:
        inner: SyncRun = zero0.build(slots, lines, stage, store)
        return KfacRun(inner, [(x, 0) for x in layers], lines, told, shared_out=False)
    found = layer_owners(
        [(x.columns, x.out) for x in layers],
        [float(slot.whole.numel()) for slot in others], lines.shards.size,
    )  # fmt: skip
    owners = dict(zip(others, found[len(layers) :], strict=True))
    for layer, owner in zip(layers, found, strict=False):
        owners[layer.weight] = owner
        if layer.bias is not None:
            owners[layer.bias] = owner
    kind = zero2.ScatteredEarly if stage.zero == 2 else ShardedOptimizer
    groups = buckets(trainable(slots), BUCKET_BYTES)
    inner = kind(slots, groups, lines, partial(OwnerBucket, owners=owners))
    owned = sorted(zip(layers, found, strict=False), key=lambda pair: pair[1])
    return KfacRun(inner, owned, lines, told, shared_out=True)


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

"""A `DistributedConfig` of transformers: sizes of the mesh, and its `tp_plan` module by module."""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping

from meshwright.ir.plan.plan import BlockLayout, Plan
from meshwright.ir.text.plain_text import docstring, quoted
from meshwright.tools.export.export import Exported, Request, title
from meshwright.tools.export.export_precision import lost_precision
from meshwright.tools.export.export_shape import Shape

_WHOLE = "replicate"
_EMBEDDING = {"S(0)": "embedding_rowwise", "S(1)": "embedding_colwise"}
_COLUMNS, _ROWS = "colwise", "rowwise"
_LINEAR = {"S(0)": _COLUMNS, "S(0,outer=2)": "packed_colwise", "S(1)": _ROWS}
_ALONE = {_COLUMNS: "colwise_gather_output", _ROWS: "rowwise_split_input"}
"""Of a module that hands on, or is handed, what is whole."""


def export(request: Request) -> Exported:
    plan, shape = request.plan, request.shape
    styles, lost = _styles(plan) if shape.tp > 1 else ({}, ())
    lines = [
        docstring(
            f"{title(plan)}.", "",
            "AutoModelForCausalLM.from_pretrained(NAME, distributed_config=DISTRIBUTED), under "
            "torchrun.", "Names are those of transformers 5.23.",
        ),
        "",
        "from transformers.distributed import DistributedConfig",
        "",
        "DISTRIBUTED = DistributedConfig(",
        *(f"    {name}={size}," for name, size in _sizes(shape)),
    ]  # fmt: skip
    if styles:
        rules = (f"        {quoted(name)}: {quoted(style)}," for name, style in styles.items())
        lines += ["    tp_plan={", *rules, "    },"]
    lines.append(")")
    return Exported("\n".join(lines) + "\n", (*shape.odd, *_missing(request), *lost))


def _sizes(shape: Shape) -> Iterator[tuple[str, int]]:
    yield "tp_size", shape.tp
    yield "fsdp_size", shape.dp_shard if shape.zero else 1
    yield "dp_replicate_size", shape.dp_replicate if shape.zero else shape.dp
    yield "pp_size", shape.pp
    yield "ep_size", shape.ep


def _styles(plan: Plan) -> tuple[dict[str, str], tuple[str, ...]]:
    """Module path -> its style, for products and embeddings; and what has none."""
    used = {name for stage in plan.stages for name in stage.layouts.values()}
    roots = {layout.pattern.partition(".")[0] for layout in plan.layouts}
    found: dict[str, str] = {}
    lost: list[str] = []
    for layout in plan.layouts:
        if layout.name in used:
            own = dict(_of_layout(layout, roots))
            known = {name: style for name, (style, _) in own.items() if style}
            found |= _paired(known, is_layer="*" in layout.pattern)
            lost += [
                f"{name} on tp is {text}: transformers has no style for it"
                for name, (style, text) in own.items()
                if not style
            ]
    return found, tuple(lost)


def _of_layout(
    layout: BlockLayout, roots: Collection[str]
) -> Iterator[tuple[str, tuple[str, str]]]:
    """Module path -> (style, placement of its weight); no style where transformers has none."""
    for key, placed in layout.parameters.items():
        module, _, last = key.rpartition(".")
        text = placed.get("tp", "")
        outside = key.partition(".")[0] in roots  # of the block, and so named from the model on
        name = ".".join(filter(None, ("" if outside else layout.pattern, module)))
        if last == "weight" and f"{module}/embedding" in layout.ops:
            yield name, (_EMBEDDING.get(text, "" if text else _WHOLE), text)
        elif last == "weight" and f"{module}/linear" in layout.ops:
            yield name, (_LINEAR.get(text, "" if text else _WHOLE), text)
        elif text and f"{module}/linear" not in layout.ops:  # a bias goes with its weight
            yield name, ("", text)


def _paired(styles: Mapping[str, str], *, is_layer: bool) -> dict[str, str]:
    """Columns stay split only where rows of the same parent take them up, and none is whole."""
    beside: dict[str, set[str]] = defaultdict(set)
    for name, style in styles.items():
        beside[name.rpartition(".")[0]].add(style)

    def of(name: str, style: str) -> str:
        near = beside[name.rpartition(".")[0]]
        pair = is_layer and {_COLUMNS, _ROWS} <= near and _WHOLE not in near
        return style if pair else _ALONE.get(style, style)

    return {name: of(name, style) for name, style in styles.items()}


def _missing(request: Request) -> Iterator[str]:
    plan, shape = request.plan, request.shape
    if shape.pp > 1 and shape.dp > 1:
        yield (
            f"{shape.dp} replicas of a pipeline of {shape.pp} ranks: transformers refuses FSDP "
            "with a pipeline"
        )
    if shape.pp > 1:
        yield "stages and schedule: transformers cuts pipelines by itself"
    if shape.cp > 1:
        yield f"context parallelism of {shape.cp}"
    if shape.sequence_parallel:
        yield "sequences split between layers: enable_sequence_parallel does nothing yet"
    if shape.zero in (1, 2):
        yield f"ZeRO {shape.zero}: FSDP 2 shards parameters too"
    if shape.recompute != "none":
        yield "recomputation: call model.gradient_checkpointing_enable()"
    if plan.num_microbatches > 1:
        yield (
            f"{plan.num_microbatches} micro-batches: give gradient_accumulation_steps="
            f"{plan.num_microbatches} and batches of {shape.samples} per process"
        )
    yield from lost_precision(plan, ("float32", "bfloat16", "float16"))

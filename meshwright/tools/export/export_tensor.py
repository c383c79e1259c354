"""Where a plan's tensor parallelism is not the one of Megatron, which other tools have too.

Theirs: embeddings and the head split the vocabulary, layers pair a column split with a row split.
"""

from collections.abc import Iterator

from meshwright.ir.plan.plan import BlockLayout, Plan

_PRODUCTS = ("addmm", "linear", "mm", "matmul")


def tensor_splits(plan: Plan) -> Iterator[str]:
    """Each op that is split otherwise, in layouts that are in use."""
    used = {name for stage in plan.stages for name in stage.layouts.values()}
    for layout in plan.layouts:
        if layout.name in used and layout.mesh.get("tp", 1) > 1:
            yield from _differences(layout)


def _differences(layout: BlockLayout) -> Iterator[str]:
    is_layer = "*" in layout.pattern
    for key, by_axis in layout.ops.items():
        kind = key.rpartition("/")[2].partition("#")[0]
        text = by_axis.get("tp", "")
        where = f"{layout.pattern}: {key} on tp is {text or 'whole'}"
        if kind == "embedding" and "position" not in key and "wpe" not in key:
            if not text.startswith("S(0)"):
                yield f"{where}; other tools split the vocabulary"
        elif kind in _PRODUCTS and "S(" not in text:
            yield f"{where}; other tools split it"
        elif kind in _PRODUCTS and not is_layer and "S(" not in text.partition(" -> ")[2]:
            yield f"{where}; other tools split the vocabulary"

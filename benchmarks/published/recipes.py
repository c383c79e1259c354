"""What a row's words about recomputation mean."""

from collections.abc import Mapping

from benchmarks.published.measured import RowError
from meshwright.costmodel.ops.op_classes import classify, op_name
from meshwright.ir.cluster.device import OpClass
from meshwright.ir.graph.graph import Block, Graph
from meshwright.ir.plan.keeping import Keeping, operands_key


def recompute_mode(words: str) -> tuple[str, int]:
    """(mode, every so-manieth layer) of a table's words."""
    low = words.lower()
    if "every second layer" in low:
        return "full", 2
    if "op" in low and ("sac" in low or "per-op" in low or "selective op" in low):
        return "op", 1
    if "attention" in low or low.strip() == "selective":
        return "core", 1
    if "full" in low:
        return "full", 1
    if low in ("none", "false", ""):
        return "none", 1
    raise RowError(f"recompute {words!r} is not known; full, selective, per-op and none are")


_STAYING = (OpClass.ATTENTION, OpClass.VIEW)


def per_op(graph: Graph, block: Block) -> Mapping[str, Keeping]:
    """Returns what torchtitan's recomputation by operators keeps of a layer: what attention makes,
    every other product (of seven those of queries, values, the gate and the way back) and what was
    reduce-scattered; all else runs again (torchtitan/models/llama3/infra/parallelize.py,
    _apply_ac_to_transformer_block)."""
    again: dict[str, Keeping] = {}
    products = 0
    for op in graph.block_ops(block):
        kind = classify(op.target)
        if kind is OpClass.MATMUL:
            products += 1
            again[operands_key(op.key)] = "recompute"
        stays = products % 2 == 1 if kind is OpClass.MATMUL else kind in _STAYING
        if not stays:
            again[op.key] = "recompute"
    return again


def core(graph: Graph, block: Block) -> Mapping[str, Keeping]:
    """Returns what selective recomputation makes again of a layer whose attention is written out:
    scores, their softmax and dropout, and what is made of them and values (Korthikanti et al. 2022,
    section 5); nothing of other layers."""
    ops = graph.block_ops(block)
    softmax = [i for i, op in enumerate(ops) if op_name(op.target) == "softmax"]
    products = [i for i, op in enumerate(ops) if op_name(op.target) == "matmul"]
    if len(softmax) != 1 or not products or not products[0] < softmax[0] < products[-1]:
        return {}  # that of a router has no such products around it
    first = max(i for i in products if i < softmax[0])
    last = min(i for i in products if i > softmax[0])
    inside = [op for op in ops[first : last + 1] if classify(op.target) is not OpClass.VIEW]
    return {op.key: "recompute" for op in inside}

"""Buffers that forward changes: where, and who reads them.

Each stage has its own copy of a buffer. So what one stage changes must not be used in another, and
a block that reads such a buffer cannot run again later: the buffer is no longer what it was.
"""

from collections.abc import Iterator, Mapping

from meshwright.ir.graph.graph import Block, Graph, Kind, Op, Ref
from meshwright.ir.plan.plan import Plan

_RUNNING = ("running_mean", "running_var")
_VIEWS = frozenset(
    "alias detach view reshape expand select slice narrow transpose t permute squeeze unsqueeze "
    "unbind split chunk diagonal unfold view_as_real view_as_complex".split()
)
_KEPT = "changed buffers"


def changed(graph: Graph) -> Mapping[str, str]:
    """Buffer -> where in the user's code it is changed first."""
    # Kept as cached properties are, with the graph.
    kept: dict[str, Mapping[str, str]] = graph.__dict__
    if _KEPT not in kept:
        kept[_KEPT] = _changed(graph)
    return kept[_KEPT]


def _changed(graph: Graph) -> dict[str, str]:
    found: dict[str, str] = {}
    for op in graph.ops:
        for name in _written(op):
            root = _root(graph, name)
            if graph.tensors[root].kind is Kind.BUFFER:
                found.setdefault(root, op.source or op.module_path or op.key)
    return found


def shared(graph: Graph) -> dict[str, tuple[str, ...]]:
    """Changed buffers that several blocks use, and those blocks."""
    users = {
        name: tuple(b.name for b in graph.blocks if name in b.params) for name in changed(graph)
    }
    return {name: blocks for name, blocks in users.items() if len(blocks) > 1}


def reads_changed(graph: Graph, block: Block) -> str:
    """A buffer that the block computes with and that forward changes, or ""."""
    known = changed(graph)
    if not known or known.keys().isdisjoint(block.params):
        return ""
    for op in graph.block_ops(block):
        if any(_only_written(graph, out) for out in op.outputs if out):
            continue
        for name in set(op.inputs) - set(_written(op)):
            if (root := _root(graph, name)) in known:
                return root
    return ""


def _only_written(graph: Graph, name: str) -> bool:
    """Whether it is a view that is only taken to write through it."""
    users = graph.users.get(name, ())
    return name in graph.producer and all(name in _written(user) for user in users)


def written(op: Op) -> tuple[str, ...]:
    """Names of the tensors that an op changes as its name says: `add_`, `div.out`."""
    name, overload = op.target.split(".")[1:3]
    if bool(op.inputs) and name.endswith("_") and not name.endswith("__"):
        return (op.inputs[0],)
    if overload == "out" or overload.endswith("_out"):
        return tuple(v.name for k, v in op.args if k.startswith("out") and isinstance(v, Ref))
    return ()


def _written(op: Op) -> tuple[str, ...]:
    """With the statistics of a batch-norm that trains."""
    args = dict(op.args)
    if op.target == "aten.batch_norm.default" and args.get("training") is True:
        given = [args.get(key) for key in _RUNNING]
        return tuple(value.name for value in given if isinstance(value, Ref))
    return written(op)


def _root(graph: Graph, name: str) -> str:
    """What a view is of."""
    while (op := graph.producer.get(name)) and op.inputs and op.target.split(".")[1] in _VIEWS:
        name = op.inputs[0]
    return name


def buffer_problems(graph: Graph, plan: Plan) -> Iterator[str]:
    """What a plan does that such buffers do not allow."""
    places = changed(graph)
    stages = [plan.stage_blocks(graph, index) for index in range(len(plan.stages))]
    for name in places:
        using = [i for i, blocks in enumerate(stages) if any(name in b.params for b in blocks)]
        if len(using) > 1:
            named = ", ".join(shared(graph)[name])
            yield (
                f"buffer {graph.tensors[name].fqn}, which forward changes ({places[name]}), is "
                f"used in stages {using[0]} and {using[1]}, each of which would have its own: keep "
                f"the blocks {named} in one stage, or take pp=1"
            )
    if not places:
        return
    for stage, blocks in zip(plan.stages, stages, strict=True):
        for block in blocks:
            again = stage.recomputes(block) or bool(stage.keeping(block))
            if again and (name := reads_changed(graph, block)):
                yield (
                    f"block {block.name} reads buffer {graph.tensors[name].fqn}, which forward "
                    f"changes ({places[name]}), so it cannot be computed again: leave it out of "
                    "recompute and saved"
                )

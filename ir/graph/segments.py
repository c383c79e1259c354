"""Cuts the ops into segments along the module tree.

A *container* is a module whose children are numbered (a list of layers). The outermost containers
with equal children give one segment per child; what lies between is a segment of its own if it has
parameters, else it belongs to a neighbour.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

from meshwright.ir.graph.graph import Kind, Op, Tensor
from meshwright.ir.graph.shards import shard_ends
from meshwright.ir.text.digest import digest

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Segment:
    """Ops `start:stop`, belonging to the module at `path` ("" for what lies between layers)."""

    path: str
    start: int
    stop: int
    container: str | None = None
    """The list of layers that it belongs to, if any."""


def find_segments(ops: Sequence[Op], prelude: int, tensors: Tensors) -> list[Segment]:
    cuts = _cut_paths(ops, prelude, tensors)
    lists = {_parent(p) for p in cuts}
    owner: dict[str, tuple[str, str | None]] = {}
    for path in {op.module_path for op in ops[prelude:]}:
        prefixes = prefixes_of(path)
        cut = next((p for p in prefixes if p in cuts), "")
        child = cut or next((p for p in prefixes if p and _parent(p) in lists), "")
        owner[path] = cut, _parent(child) if child else None
    runs: list[Segment] = []
    start = prelude
    for (path, container), group in groupby(ops[prelude:], lambda op: owner[op.module_path]):
        stop = start + sum(1 for _ in group)
        runs.append(Segment(path, start, stop, container))
        start = stop
    found = _glue(runs, ops, tensors)
    return _sharded(found[0], ops, tensors) if len(found) == 1 else found


def _sharded(only: Segment, ops: Sequence[Op], tensors: Tensors) -> list[Segment]:
    """Shards of a model that has no parts to cut it at; they lie between layers, so to speak."""
    ends = shard_ends(ops, only.start, only.stop, tensors)
    if len(ends) == 2:
        return [only]
    return [Segment("", start, stop) for start, stop in pairwise(ends)]


def _glue(runs: list[Segment], ops: Sequence[Op], tensors: Tensors) -> list[Segment]:
    """Join each run without parameters to a neighbour.

    It goes with the layer before it inside a list of layers and at the end, else with what follows.
    """
    glued: list[Segment] = []
    for index, run in enumerate(runs):
        following = runs[index + 1] if index + 1 < len(runs) else None
        previous = glued[-1] if glued else None
        bare = not has_parameters(ops[run.start : run.stop], tensors)
        if previous and not has_parameters(ops[previous.start : previous.stop], tensors):
            glued[-1] = replace(run, start=previous.start)
        elif previous and bare and (not following or _siblings(previous, run, following)):
            glued[-1] = replace(previous, stop=run.stop)
        elif previous and previous.path == run.path:
            glued[-1] = replace(previous, stop=run.stop)
        else:
            glued.append(run)
    return glued


def _siblings(previous: Segment, run: Segment, following: Segment) -> bool:
    """Whether `run` is part of the list of `previous`, or lies between two of its layers."""
    if run.path or not previous.path:
        return False
    return previous.container in (run.container, following.container)


def has_parameters(ops: Iterable[Op], tensors: Tensors) -> bool:
    return any(
        name in tensors and tensors[name].kind is Kind.PARAMETER for op in ops for name in op.inputs
    )


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def prefixes_of(path: str) -> list[str]:
    """`a.b.c`: a, a.b, a.b.c."""
    parts = path.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def _cut_paths(ops: Sequence[Op], prelude: int, tensors: Tensors) -> set[str]:
    tree = _Tree(ops, prelude, tensors)
    cuts = tree.cuts("", numbered=True)
    return cuts if len(cuts) > 1 else tree.cuts("", numbered=False)


class _Tree:
    """The module tree of the ops, with a hash of what each module does."""

    def __init__(self, ops: Sequence[Op], prelude: int, tensors: Tensors) -> None:
        self.children: dict[str, dict[str, None]] = {}
        spans: dict[str, list[int]] = {}
        for index in range(prelude, len(ops)):
            path = ops[index].module_path
            previous = ""
            for prefix in prefixes_of(path) if path else []:
                self.children.setdefault(previous, {})[prefix] = None
                spans.setdefault(prefix, []).append(index)
                previous = prefix
        self.trainable = {
            p for p, indices in spans.items() if has_parameters((ops[i] for i in indices), tensors)
        }
        self.whole = {p for p, i in spans.items() if i[-1] - i[0] + 1 == len(i)}
        self.hashes = {
            p: _shallow_hash([ops[i] for i in spans[p]], p, tensors)
            for p in self.trainable & self.whole
        }

    def parts(self, path: str) -> list[str]:
        return [c for c in self.children.get(path, {}) if c in self.trainable]

    def is_list(self, path: str) -> bool:
        parts = self.parts(path)
        return (
            len(parts) > 1
            and all(p.rpartition(".")[2].isdigit() for p in parts)
            and all(p in self.whole for p in parts)
        )

    def repeats(self, path: str) -> bool:
        """Whether `path` is a list with two equal children."""
        parts = self.parts(path)
        return self.is_list(path) and len({self.hashes[p] for p in parts}) < len(parts)

    def holds_repeats(self, path: str) -> bool:
        return self.repeats(path) or any(self.holds_repeats(p) for p in self.parts(path))

    def cuts(self, path: str, numbered: bool) -> set[str]:
        """The paths under `path` that become blocks."""
        parts = self.parts(path)
        if self.repeats(path):
            return set(parts)
        if self.is_list(path) or not numbered:
            kept = {p for p in parts if p in self.whole and not self.holds_repeats(p)}
        else:
            kept = set()
        below = [p for p in parts if p not in kept]
        if not numbered and len(parts) > 1:
            return kept
        return kept.union(*(self.cuts(p, numbered) for p in below)) if below else kept


def _shallow_hash(ops: Sequence[Op], path: str, tensors: Tensors) -> str:
    """A quick signature of the module at `path`: its calls and parameters, without the wiring."""
    return digest([
        (op.target, [
            (t.fqn.removeprefix(path), t.shape)
            for t in (tensors[n] for n in op.inputs)
            if t.kind is Kind.PARAMETER
        ], [tensors[n].shape for n in op.outputs if n])
        for op in ops
    ])  # fmt: skip

"""Cuts the ops into blocks along the module tree, and finds which blocks are equal.

A *container* is a module whose children are numbered (a list of layers). The outermost containers
with equal children give one block per child; what lies between is a block of its own if it has
parameters, else it belongs to the block before it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from meshwright.ir.digest import digest
from meshwright.ir.graph import Arg, Block, Kind, Op, Ref, Tensor

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Segment:
    """Ops `start:stop`, belonging to the module at `path` ("" for what lies between layers)."""

    path: str
    start: int
    stop: int
    container: str | None = None
    """The list of layers that it belongs to, if any."""


def find_blocks(
    ops: Sequence[Op], prelude: int, tensors: Tensors, loss: str
) -> tuple[tuple[Op, ...], tuple[Block, ...]]:
    """The ops with their keys, and the blocks over `ops[prelude:]`."""
    segments = _segments(ops, prelude, tensors)
    names = _names(ops, segments, tensors)
    last_use = _last_use(ops, loss)
    blocks = [
        _block(ops, segment, name, tensors, last_use)
        for segment, name in zip(segments, names, strict=True)
    ]
    patterns = _patterns(blocks, segments)
    blocks = [replace(b, pattern=patterns[b.signature]) for b in blocks]
    return _with_keys(ops, prelude, blocks), tuple(blocks)


# Where to cut -------------------------------------------------------------------------------------


def _segments(ops: Sequence[Op], prelude: int, tensors: Tensors) -> list[Segment]:
    cuts = _cut_paths(ops, prelude, tensors)
    lists = {_parent(p) for p in cuts}
    owner: dict[str, tuple[str, str | None]] = {}
    for path in {op.module_path for op in ops[prelude:]}:
        prefixes = _prefixes(path)
        cut = next((p for p in prefixes if p in cuts), "")
        child = cut or next((p for p in prefixes if p and _parent(p) in lists), "")
        owner[path] = cut, _parent(child) if child else None
    runs: list[Segment] = []
    start = prelude
    for (path, container), group in groupby(ops[prelude:], lambda op: owner[op.module_path]):
        stop = start + sum(1 for _ in group)
        runs.append(Segment(path, start, stop, container))
        start = stop
    return _glue(runs, ops, tensors)


def _glue(runs: list[Segment], ops: Sequence[Op], tensors: Tensors) -> list[Segment]:
    """Join each run without parameters to a neighbour.

    It goes with the layer before it inside a list of layers and at the end, else with what follows.
    """
    glued: list[Segment] = []
    for index, run in enumerate(runs):
        following = runs[index + 1] if index + 1 < len(runs) else None
        previous = glued[-1] if glued else None
        bare = not _has_parameters(ops[run.start : run.stop], tensors)
        if previous and not _has_parameters(ops[previous.start : previous.stop], tensors):
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


def _has_parameters(ops: Iterable[Op], tensors: Tensors) -> bool:
    return any(
        name in tensors and tensors[name].kind is Kind.PARAMETER for op in ops for name in op.inputs
    )


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _prefixes(path: str) -> list[str]:
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
            for prefix in _prefixes(path) if path else []:
                self.children.setdefault(previous, {})[prefix] = None
                spans.setdefault(prefix, []).append(index)
                previous = prefix
        self.trainable = {
            p for p, indices in spans.items() if _has_parameters((ops[i] for i in indices), tensors)
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


# Names --------------------------------------------------------------------------------------------


def _names(ops: Sequence[Op], segments: list[Segment], tensors: Tensors) -> list[str]:
    taken: dict[str, int] = {s.path: 0 for s in segments if s.path}
    names: list[str] = []
    seen: set[str] = set()
    for segment in segments:
        mine = ops[segment.start : segment.stop]
        name = segment.path or _between_name(mine, tensors, taken, first=not names)
        unique, count = name, 1
        while unique in seen or (unique in taken and not segment.path):
            count += 1
            unique = f"{name}#{count}"
        seen.add(unique)
        names.append(unique)
    return names


def _between_name(
    ops: Sequence[Op], tensors: Tensors, taken: Mapping[str, int], first: bool
) -> str:
    """The common module of the ops with parameters; else that of the outermost one."""
    paths = [op.module_path for op in ops if _has_parameters([op], tensors)] or [""]
    common = [_prefixes(p) for p in paths]
    shared = [p for p in common[0] if all(p in c for c in common[1:])]
    if shared and not any(t.startswith(shared[-1] + ".") for t in taken):
        return shared[-1] or "main"
    return paths[0 if first else -1] or "main"


# Equality -----------------------------------------------------------------------------------------


def _last_use(ops: Sequence[Op], loss: str) -> dict[str, int]:
    last = {name: index for index, op in enumerate(ops) for name in op.inputs}
    last[loss] = len(ops)
    return last


def _block(
    ops: Sequence[Op], segment: Segment, name: str, tensors: Tensors, last_use: Mapping[str, int]
) -> Block:
    """Block of the segment; inputs, outputs and params in order of first appearance."""
    mine = ops[segment.start : segment.stop]
    made = {o: None for op in mine for o in op.outputs if o}
    read = dict.fromkeys(n for op in mine for n in op.inputs if n not in made)
    held = (Kind.PARAMETER, Kind.BUFFER, Kind.CONSTANT)
    params = tuple(n for n in read if tensors[n].kind in held)
    inputs = tuple(n for n in read if tensors[n].kind not in held)
    outputs = tuple(o for o in made if last_use.get(o, -1) >= segment.stop)
    signature = _signature(mine, name, tensors, inputs, params, outputs)
    return Block(name, "", signature, segment.start, segment.stop, inputs, outputs, params)


def _signature(
    ops: Sequence[Op],
    name: str,
    tensors: Tensors,
    inputs: tuple[str, ...],
    params: tuple[str, ...],
    outputs: tuple[str, ...],
) -> str:
    local = {n: f"input {i}" for i, n in enumerate(inputs)}
    local |= {n: f"param {i}" for i, n in enumerate(params)}
    described: list[Any] = [
        (tensors[n].shape, tensors[n].dtype, tensors[n].requires_grad, tensors[n].kind.value,
         tensors[n].fqn.removeprefix(name + "."), tensors[n].value)
        for n in (*inputs, *params)
    ]  # fmt: skip
    for op in ops:
        wired = [(key, _localised(value, local)) for key, value in op.args]
        for out in op.outputs:
            local[out] = f"value {len(local)}" if out else ""
        described.append((op.target, wired, [
            (tensors[o].shape, tensors[o].dtype, tensors[o].requires_grad) if o else None
            for o in op.outputs
        ]))  # fmt: skip
    return digest([described, [local[o] for o in outputs]])


def _localised(value: Arg, local: Mapping[str, str]) -> Any:
    if isinstance(value, Ref):
        return ["ref", local[value.name]]
    if isinstance(value, tuple):
        return [_localised(item, local) for item in value]
    return value


# Patterns and keys --------------------------------------------------------------------------------


def _patterns(blocks: Sequence[Block], segments: Sequence[Segment]) -> dict[str, str]:
    """Signature -> pattern; the commonest signature of a container gets `container.*`."""
    groups: dict[str, list[Block]] = {}
    for block in blocks:
        groups.setdefault(block.signature, []).append(block)
    found: dict[str, str] = {}
    for signature, members in sorted(groups.items(), key=lambda g: (-len(g[1]), g[1][0].start)):
        container, _, number = members[0].name.rpartition(".")
        pattern = members[0].name
        if len(members) > 1:
            pattern = f"{container}.*" if container else "*"
            if pattern in found.values():
                pattern = f"{pattern}@{number}"
        found[signature] = pattern
    return found


def _with_keys(ops: Sequence[Op], prelude: int, blocks: Sequence[Block]) -> tuple[Op, ...]:
    keys: dict[str, list[str]] = {}
    done = [replace(op, key=key) for op, key in zip(ops[:prelude], _keys(ops[:prelude], ""))]  # noqa: B905
    for block in blocks:
        mine = ops[block.start : block.stop]
        if block.signature not in keys:
            keys[block.signature] = _keys(mine, block.name)
        done += [replace(op, key=key) for op, key in zip(mine, keys[block.signature], strict=True)]
    return tuple(done)


def _keys(ops: Sequence[Op], base: str) -> list[str]:
    """`attn.c_attn/addmm`, then `/add#2` for the second one there."""
    counts: dict[str, int] = {}
    keys: list[str] = []
    for op in ops:
        path = op.module_path
        path = "" if path == base else path.removeprefix(base + ".")
        key = f"{path}/{op.target.split('.')[1]}"
        counts[key] = counts.get(key, 0) + 1
        keys.append(key if counts[key] == 1 else f"{key}#{counts[key]}")
    return keys

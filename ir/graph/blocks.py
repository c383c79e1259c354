"""Blocks: the segments of the step, with their names, and which of them are equal."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from meshwright.ir.graph.graph import Arg, Block, Kind, Op, Ref
from meshwright.ir.graph.segments import (
    Segment,
    Tensors,
    find_segments,
    has_parameters,
    prefixes_of,
)
from meshwright.ir.graph.windows import convolves_channels_last
from meshwright.ir.text.digest import digest


def find_blocks(
    ops: Sequence[Op], prelude: int, tensors: Tensors, loss: str
) -> tuple[tuple[Op, ...], tuple[Block, ...]]:
    """The ops with their keys, and the blocks over `ops[prelude:]`."""
    segments = find_segments(ops, prelude, tensors)
    names = _names(ops, segments, tensors)
    last_use = _last_use(ops, loss)
    blocks = [
        _block(ops, segment, name, tensors, last_use)
        for segment, name in zip(segments, names, strict=True)
    ]
    patterns = _patterns(blocks, segments)
    blocks = [replace(b, pattern=patterns[b.signature]) for b in blocks]
    return _with_keys(ops, prelude, blocks), tuple(blocks)


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
    paths = [op.module_path for op in ops if has_parameters([op], tensors)] or [""]
    common = [prefixes_of(p) for p in paths]
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
        last = ["channels last"] if convolves_channels_last(op, tensors) else []
        described.append((op.target, wired, *last, [
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
        name = op.target.split(".")[1]
        key, alike = f"{path}/{name}", f"{path}/{_COUNTED_AS.get(name, name)}"
        counts[alike] = counts.get(alike, 0) + 1
        keys.append(key if counts[alike] == 1 else f"{key}#{counts[alike]}")
    return keys


_COUNTED_AS = {"bias_gelu_dropout": "dropout"}
"""Its masks are those of the dropout that it has taken in."""

"""Readable Python for review: a function per distinct block, and a `forward` that calls them."""

import re
from collections.abc import Iterator, Sequence
from itertools import count
from keyword import iskeyword
from operator import getitem, truediv
from pathlib import Path

from torch import fx

from meshwright.codegen.lower.program import BlockCode, Call, StageProgram
from meshwright.codegen.lower.stage_context import Where
from meshwright.codegen.passes.compiled import Region
from meshwright.codegen.passes.halves import Halves
from meshwright.codegen.passes.segments import Phases, PhaseValue
from meshwright.codegen.sharded.sharded import FUNCTIONS
from meshwright.ir.text.plain_text import comment, docstring, quoted
from meshwright.ir.torch_private import OpOverload

_COMPILED = "@torch.compile(fullgraph=True, dynamic=False)\n"
_HEADER = """\
{says}

import torch

from meshwright.codegen.sharded import sharded

aten = torch.ops.aten
"""


def write_sources(programs: Sequence[StageProgram], directory: Path) -> tuple[Path, ...]:
    """Writes `stage<index>.py` for each program."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = tuple(directory / f"stage{program.index}.py" for program in programs)
    for path, program in zip(paths, programs, strict=True):
        path.write_text(program.source, encoding="utf-8")
    return paths


def stage_source(program: StageProgram, at: Where) -> str:
    """The whole module."""
    stage, plan_hash = at.plan.stages[at.stage], at.plan.hash or "(no hash)"
    place = ", ".join(f"{a} {at.coordinates[a]} of {axis.size}" for a, axis in at.axes.items())
    header = _HEADER.format(says=docstring(
        f"Stage {at.stage} of {len(at.plan.stages)}: blocks {stage.first} to {stage.last}.",
        "",
        f"For the rank at {place}.",
        f"Written by meshwright from plan {plan_hash}; the runtime runs the same code from memory.",
        "`forward` computes one micro-batch: `tensors` maps names to params, inputs and received "
        "values.",
    ))  # fmt: skip
    calls = [call for call in (program.totals, program.prelude, *program.calls) if call]
    names = _function_names(calls)
    functions = [_function(code, names[id(code)]) for code in _codes(calls)]
    return "\n\n".join([header, *functions, *_drivers(program, names)])


def _codes(calls: Sequence[Call]) -> list[BlockCode]:
    return list({id(call.code): call.code for call in calls}.values())


def _function_names(calls: Sequence[Call]) -> dict[int, str]:
    """A distinct name for each block's function."""
    names: dict[int, str] = {}
    for code in _codes(calls):
        base = re.sub(r"[^A-Za-z0-9]+", "_", code.pattern).strip("_") or "block"
        base = base if base.isidentifier() and not iskeyword(base) else f"block_{base}"
        taken = {*names.values(), "forward", "totals", "aten", "sharded", "torch"}
        numbered = (f"{base}_{i}" if i else base for i in count())
        names[id(code)] = next(name for name in numbered if name not in taken)
    return names


def _function(code: BlockCode, name: str) -> str:
    if code.halves:
        return _in_halves(code, code.halves, name)
    nodes = list(code.module.graph.nodes)
    parameters = [node.name for node in nodes if node.op == "placeholder"]
    whole = _defined(name, parameters, code.pattern, [
        *_lines(nodes, name), f"return {_text(tuple(nodes[-1].args[0]))}"
    ])  # fmt: skip
    return "\n\n".join([*_regions(code.module, name, code.pattern), whole])


def _regions(module: fx.GraphModule, name: str, pattern: str) -> Iterator[str]:
    """What torch.compile makes kernels of: the submodules of a block, or of a phase."""
    for target, region in module.named_children():
        assert isinstance(region, Region)
        nodes = list(region.code.graph.nodes)
        parameters = [node.name for node in nodes if node.op == "placeholder"]
        body = [*_lines(nodes, name), f"return {_text(nodes[-1].args[0])}"]
        yield _COMPILED + _defined(f"{name}_{target}", parameters, f"{pattern}, compiled", body)


def _defined(name: str, parameters: Sequence[str], says: str, lines: Sequence[str]) -> str:
    head = [_wrapped(f"def {name}({', '.join(parameters)}):"), f"    {docstring(says)}"]
    return "\n".join([*head, *(_wrapped(f"    {line}") for line in lines), ""])


def _lines(nodes: Sequence[fx.Node], name: str) -> Iterator[str]:
    for node in nodes:
        if node.op not in ("placeholder", "output"):
            if said := node.meta.get("comment"):
                yield comment(said)
            yield f"{node.name} = {_expression(node, name)}"


def _in_halves(code: BlockCode, halves: Halves, name: str) -> str:
    """A generator for each half, and the function that lets them take turns."""
    params = halves.cuts[0].arguments[: halves.num_params]
    inputs = halves.cuts[0].arguments[halves.num_params :]
    ahead = halves.cuts[0].phases[0]
    texts, calls, parted = [], [], list[str]()
    for number, (cut, samples) in enumerate(zip(halves.cuts, halves.samples, strict=True), 1):
        given = ["comm", *params, *ahead.made, *inputs]
        says = f"{code.pattern}, {samples} samples"
        texts.append(_defined(f"{name}_half{number}", given, says, list(_half_lines(cut, name))))
        for phase in cut.phases[number - 1 :]:
            parted += _regions(phase.code, name, code.pattern)
            if phase.beside:
                parted += _regions(phase.beside.code, name, code.pattern)
        parts = [f"{x}[{number - 1}]" if d is not None else x
                 for x, d in zip(inputs, halves.splits, strict=True)]  # fmt: skip
        calls.append(f"{name}_half{number}({', '.join([*given[: -len(inputs)], *parts])})")
    split = [x for x, dim in zip(inputs, halves.splits, strict=True) if dim is not None]
    body = [*_lines(list(ahead.code.graph.nodes), name)]
    body += [f"{x} = halves({x}, {halves.samples})" for x in split]
    body.append(
        "# `codegen.passes.halves`: one half computes while a collective of the other runs."
    )
    body += ["return take_turns(", *(f"    {call}," for call in calls), ")"]
    texts.append(_defined(name, ["comm", *params, *inputs], f"{code.pattern}, in halves", body))
    return "\n\n".join([*parted, *texts])


def _half_lines(cut: Phases, name: str) -> Iterator[str]:
    for phase in cut.phases[1:]:
        yield from _lines(list(phase.code.graph.nodes), name)
        for moved in phase.moves:
            where = "".join(f", {_text(arg)}" for arg in (moved.axis, *moved.where))
            where += "".join(f", {key}={_text(value)}" for key, value in moved.more.items())
            yield f"{moved.made} = comm.{moved.method}({moved.source}{where})"
        if any(moved.sends_forward for moved in phase.moves):
            yield "yield"
        if phase.beside:
            if phase.moves:
                yield "# Beside what has begun:"
            yield from _lines(list(phase.beside.code.graph.nodes), name)
    yield f"return ({', '.join(cut.results)},)"


def _expression(node: fx.Node, name: str) -> str:
    """`name`: of the block's function."""
    arguments = [_text(arg) for arg in node.args]
    arguments += [f"{name}={_text(arg)}" for name, arg in node.kwargs.items()]
    if node.op == "call_method":
        return f"{arguments[0]}.{node.target}({', '.join(arguments[1:])})"
    if node.op == "call_module":
        return f"{name}_{node.target}({', '.join(arguments)})"
    if node.target is getitem:
        return f"{arguments[0]}[{arguments[1]}]"
    if node.target is truediv:
        return f"{arguments[0]} / {arguments[1]}"
    if node.target is getattr:
        return f"{arguments[0]}.{node.args[1]}"
    return f"{_callable(node.target)}({', '.join(arguments)})"


def _wrapped(line: str) -> str:
    """A call that is too long, with its arguments on lines of their own. Comments and texts stay
    whole: what is on a line of its own would be code."""
    if len(line) <= 100 or line.lstrip().startswith(("#", '"')):
        return line
    signs = list(_outside_texts(line))
    after = next((at for at, sign, depth in signs if sign == "=" and not depth), 0)
    opening = next((at for at, sign, _ in signs if sign == "(" and at > after), None)
    if opening is None:
        return line
    closing = max(at for at, sign, _ in signs if sign == ")")
    ends = [at + 1 for at, sign, _ in signs if sign == "," and opening < at < closing]
    starts = [opening + 1, *ends]
    parts = [line[i:j].strip() for i, j in zip(starts, [*ends, closing], strict=True)]
    if last := parts.pop():
        parts.append(f"{last},")
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    inside = [indent + parts[0]]
    for part in parts[1:]:
        if len(inside[-1]) + 1 + len(part) > 100:
            inside.append(indent + part)
        else:
            inside[-1] += f" {part}"
    return "\n".join([line[: opening + 1], *inside, indent[4:] + line[closing:]])


def _outside_texts(line: str) -> Iterator[tuple[int, str, int]]:
    """Where brackets, commas and signs of equality are, with how deep in brackets they are."""
    depth = 0
    for found in _SIGNS.finditer(line):
        sign = found[0]
        depth -= sign in ")]}"
        if not sign.startswith('"'):
            yield found.start(), sign, depth
        depth += sign in "([{"


_SIGNS = re.compile(r'"(?:[^"\\]|\\.)*"|[()\[\]{},=]')


def _callable(target: object) -> str:
    if isinstance(target, OpOverload):
        text = str(target)
        return text if text.startswith("aten.") else f"torch.ops.{text}"
    named = (name for name, function in FUNCTIONS.items() if function is target)
    # What no table has is of a kernel in a user's file, which has the kernel's name.
    return next(named, "") or f'sharded.kernel_of("{target.__module__.rpartition(".")[2]}")'


def _text(arg: object) -> str:
    match arg:
        case fx.Node() | PhaseValue():
            return arg.name
        case list() | tuple():
            items = ", ".join(map(_text, arg))
            return f"({items},)" if len(arg) == 1 else f"({items})"
        case float() if arg != arg or arg in (float("inf"), float("-inf")):
            return f'float("{arg}")'
        case str():
            return quoted(arg)
    return repr(arg)


def _drivers(program: StageProgram, names: dict[int, str]) -> Iterator[str]:
    if program.totals:
        yield _driver("totals", [program.totals], names, program.totals.outputs)
    results = tuple(value.name for value in program.sends)
    calls = [call for call in (program.prelude, *program.calls) if call]
    yield _driver("forward", calls, names, (*results, *([program.loss] if program.loss else [])))


def _driver(
    name: str, calls: Sequence[Call], names: dict[int, str], results: tuple[str, ...]
) -> str:
    lines = [f"def {name}(comm, tensors):", "    values = dict(tensors)"]
    for call in calls:
        given = ", ".join(f"values[{_text(n)}]" for n in (*call.params, *call.inputs))
        made = ", ".join(f"values[{_text(n)}]" for n in call.outputs)
        lines += [f"    {comment(f'{how} what {key} makes')}" for key, how in call.saved.items()]
        lines += [
            "    # `runtime.stage.chain`: a half goes on from the block before by itself."
        ] * (call.follows)
        lines.append(f"    comm.block = {_text(call.block)}" + "  # recomputed" * bool(call.whole))
        target = f"    ({made},)"
        if len(target) > 80:
            *target_lines, target = _wrapped(target).split("\n")
            lines += target_lines
        lines.append(_wrapped(f"{target} = {names[id(call.code)]}(comm, {given})"))
    returned = ", ".join(f"{_text(n)}: values[{_text(n)}]" for n in results)
    return "\n".join([*lines, f"    return {{{returned}}}", ""])

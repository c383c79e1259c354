"""What pages of the docs show in code works as it is printed."""

import ast
import contextlib
import inspect
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

import meshwright as mw
from docs.blocks import KINDS, ROOT, Block, blocks, count_fences, pages, runs_here, spans
from meshwright.cli import COMMANDS, app
from meshwright.testing.spawn import run_ranks
from tests.command_line import GPT2, SEARCH, invoke
from tests.integrations.as_torchrun import as_torchrun

TARGET = GPT2
ELSEWHERE = {"docs/your_model.md": "test_newcomer.py"}
"""Pages that another test runs."""
FIRST_ELSEWHERE = {"README.md": "test_readme.py"}
"""Pages whose first block of Python another test runs."""
SMALLER = {"hf:MixtralConfig": 'hf:MixtralConfig{"num_hidden_layers": 2}'}
"""Models of commands at full size, and what is searched for here; the whole in `make test-all`."""
WORDS = re.compile(r"[A-Z_]{3,}")
"""What a page leaves to the reader: TARGET, DIR."""


@cache
def all_blocks() -> tuple[Block, ...]:
    return tuple(block for page in pages() for block in blocks(page))


def of_kind(*kinds: str) -> list[Block]:
    found = [block for block in all_blocks() if block.kind in kinds]
    assert found
    return found


def test_every_fence_says_what_is_in_it():
    for page in pages():
        assert len(list(blocks(page))) == count_fences(page), f"{page}: a blank line before a fence"
    for block in all_blocks():
        assert block.kind in KINDS, f"{block.place}: {block.kind!r} is none of {KINDS}"


def words_of(line: str) -> list[list[str]]:
    """The commands of a line of shell, as a shell splits and expands them."""
    tell = 'tell() { printf "%s\\0" "$@"; printf "\\n"; }; '
    tools = "".join(f'{name}() {{ tell {name} "$@"; }}; ' for name in ("meshwright", "torchrun"))
    done = subprocess.run(["bash", "-c", f"{tell}{tools}{line}"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [row.split("\0")[:-1] for row in done.stdout.splitlines()]


def parsed(words: list[str], where: str) -> None:
    """Holds a command against the parser: its options, their kinds, and what it must have."""
    group = typer.main.get_command(app)
    if words and not words[0].startswith("-"):
        assert words[0] in COMMANDS.names, f"{where}: there is no command {words[0]!r}"
        command = group.get_command(typer.Context(group), words[0])
        command.make_context(words[0], [*words[1:]])
    else:
        known = {name for option in group.params for name in (*option.opts, *option.secondary_opts)}
        assert set(words) <= known | {"--help"}, where


def test_commands_of_blocks_are_parsed():
    for block in of_kind("sh"):
        assert subprocess.run(["bash", "-n"], input=block.text, text=True).returncode == 0
        assigned = ""
        for line in block.lines():
            if re.match(r"[A-Z0-9_]+=", line):
                assigned += f"{line}; "
                continue
            name = line.split()[0]
            assert name in ("meshwright", "torchrun", "make"), f"{block.place}: {line}"
            if name == "make":
                check_make(line.split()[1], block.place)
            for words in words_of(assigned + line) if name == "meshwright" else ():
                parsed(words[1:], f"{block.place}: {line}")


def check_make(target: str, where: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.M), where


def test_python_of_blocks_names_what_there_is():
    """Also where a block cannot run here: it compiles, imports exist, calls of ours bind."""
    for block in of_kind("python", "diff"):
        for text in sides(block):
            tree = ast.parse(text, block.place)
            for node in ast.walk(tree):
                if isinstance(node, ast.Call):
                    check_call(node, block.place)
                if isinstance(node, ast.ImportFrom) and (node.module or "") != "train":
                    module = import_module(node.module or "")
                    missing = [a.name for a in node.names if not hasattr(module, a.name)]
                    assert not missing, f"{block.place}: {node.module} has no {missing}"


def sides(block: Block) -> list[str]:
    """The code of a block; of a diff, that before and that after."""
    if block.kind != "diff":
        return [block.text]
    lines = block.text.splitlines(keepends=True)
    return ["".join(line[2:] or "\n" for line in lines if line[0] != less) for less in "+-"]


def check_call(call: ast.Call, where: str) -> None:
    """Names of `mw`, and arguments that they have."""
    function = call.func
    if not (isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name)):
        return
    if function.value.id != "mw":
        return
    found = getattr(mw, function.attr, None)
    assert found is not None, f"{where}: mw has no {function.attr!r}"
    signature = inspect.signature(found)
    if any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values()):
        return
    unknown = [k.arg for k in call.keywords if k.arg and k.arg not in signature.parameters]
    assert not unknown, f"{where}: mw.{function.attr} takes no {unknown}"


def test_names_between_backticks_are_names_of_something():
    environment = "".join(path.read_text() for path in sources())
    seen, wrong = 0, []
    for page in pages():
        for span in spans(page):
            try:
                seen += check_span(span, f"{page.relative_to(ROOT)}: `{span}`", environment)
            except AssertionError as error:
                wrong.append(str(error).splitlines()[0])
    assert seen > 300 and not wrong, "\n".join(wrong)


def sources() -> Iterator[Path]:
    for folder in ("meshwright", "ir", "costmodel", "planner", "codegen", "runtime", "benchmarks"):
        yield from (ROOT / folder).rglob("*.py")
    yield ROOT / "tests" / "conftest.py"


def check_span(span: str, where: str, environment: str) -> bool:
    """Whether it is one of the kinds that are checked; fails where it names nothing."""
    head, *rest = span.split()
    if head == "meshwright" and rest and rest[0] in COMMANDS.names:
        group = typer.main.get_command(app)
        command = group.get_command(typer.Context(group), rest[0])
        known = {n for o in command.params for n in (*o.opts, *o.secondary_opts)} | {"--help"}
        unknown = [word for word in rest[1:] if word[0] == "-" and word not in known]
        assert not unknown, f"{where}: meshwright {rest[0]} has no {unknown}"
    elif re.fullmatch(r"mw\.\w+(\(.*\))?(\.\w+)?", span):
        assert hasattr(mw, re.split(r"\W", span)[1]), where
        for node in ast.walk(ast.parse(span)):
            if isinstance(node, ast.Call):
                check_call(node, where)
    elif span.startswith("python -m ") and not WORDS.search(rest[1]):
        assert find_spec(rest[1]), where
    elif head == "make" and len(rest) == 1:
        check_make(rest[0], where)
    elif found := re.match(r"MESHWRIGHT_[A-Z_]+\b(?!\*)", span):
        assert found[0] in environment, where
    elif re.fullmatch(r"\w+/[\w/]+(?<!/mine)\.(py|md|json)", span):
        near = [ROOT / base / span for base in (".", "meshwright")]
        ours = any((place / span.split("/")[0]).exists() for place in (ROOT, ROOT / "meshwright"))
        assert not ours or any(path.exists() for path in near), where
    elif found := re.fullmatch(r"meshwright((?:\.[a-z_]\w*)+)(\.[A-Z]\w*)?", span):
        check_dotted(span, where)
    elif found := re.search(r"pip install .?meshwright\[(.*)\]", span):
        extras = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.M)
        assert set(found[1].split(",")) <= set(extras), where
    else:
        return False
    return True


def check_dotted(name: str, where: str) -> None:
    module, _, last = name.rpartition(".")
    if hasattr(torch.ops.meshwright, last):
        return
    with contextlib.suppress(ModuleNotFoundError):
        if find_spec(name):
            return
    assert hasattr(import_module(module), last), where


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    """A plan for TARGET on two processes."""
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    assert invoke(*SEARCH, "-o", str(path)) == 0
    return path


@pytest.mark.parametrize("page", sorted({b.page for b in all_blocks()}), ids=lambda p: p.stem)
def test_blocks_of_a_page_run(page, small, tmp_path, monkeypatch, capsys):
    """As they are printed, but for the sizes of some models."""
    run_page(page, small, tmp_path, monkeypatch, SMALLER)


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    sorted({b.page for b in all_blocks() if any(name in b.text for name in SMALLER)}),
    ids=lambda p: p.stem,
)
def test_blocks_of_a_page_run_as_printed(page, small, tmp_path, monkeypatch, capsys):
    run_page(page, small, tmp_path, monkeypatch, {})


def run_page(page: Path, small: Path, tmp_path: Path, monkeypatch, instead: Mapping[str, str]):
    name = str(page.relative_to(ROOT))
    if name in ELSEWHERE:
        assert (ROOT / "tests" / ELSEWHERE[name]).exists()
        return
    monkeypatch.chdir(tmp_path)
    for given in ("plan.json", "a.json", "b.json"):  # pages speak of plans that the reader has
        shutil.copy(small, given)
    found = [b for b in blocks(page) if b.kind in ("python", "diff", "sh")]
    if name in FIRST_ELSEWHERE:
        assert (ROOT / "tests" / FIRST_ELSEWHERE[name]).exists()
        found.remove(next(block for block in found if block.kind == "python"))
    for program in programs(found):
        run_program(program, instead)


def programs(found: list[Block]) -> Iterator[list[Block]]:
    """Blocks of Python that go on where the one before them ended; others alone."""
    together: list[Block] = []
    for block in found:
        if block.needs and block.kind != "sh":
            continue
        assert block.kind != "diff" or block.ranks, f"{block.place}: name its torchrun line"
        if together and (block.kind == "sh" or block.ranks or block.kind != together[0].kind):
            yield together
            together = []
        together.append(block)
        if block.kind == "sh":
            yield together
            together = []
    if together:
        yield together


def run_program(program: list[Block], instead: Mapping[str, str]) -> None:
    first, texts = program[0], [block.text for block in program]
    if first.kind == "sh":
        for line in filter(runs_here, first.lines()):
            for words in words_of(line) if line.startswith("meshwright") else ():
                others = {"TARGET": TARGET, **instead}
                asked = [others.get(word, word) for word in words[1:]]
                assert invoke(*asked) == 0, f"{first.place}: {line}"
    elif first.kind == "diff":  # both make their process group themselves
        for side in sides(first):
            run_ranks(first.ranks, run_rank, first.ranks, free_port(), side, first.place,
                      timeout_s=200, init=False)  # fmt: skip
    elif first.ranks:
        run_ranks(first.ranks, run_in_group, texts, first.place, timeout_s=200)
    else:
        run_texts(texts, first.place)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return int(found.getsockname()[1])


def run_rank(rank: int, store: str, world: int, port: int, text: str, place: str) -> None:
    """As torchrun would start it."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world),
                   "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "localhost",
                   "MASTER_PORT": str(port)}  # fmt: skip
    run_texts([text], place)


def run_in_group(texts: list[str], place: str) -> None:
    as_torchrun()
    run_texts(texts, place)


def run_texts(texts: Iterable[str], place: str) -> None:
    """Runs them one after the other, as one script."""
    scope: dict[str, Any] = {"__name__": "__main__"}
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        for text in texts:
            exec(compile(text, place, "exec"), scope)

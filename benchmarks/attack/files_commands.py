"""Takes spoiled files through the commands, in this process, and judges what came of it."""

import ast
import io
import re
import resource
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from typer.main import get_command

from benchmarks.attack.files_mutate import MARK
from meshwright import cli
from meshwright.cli import race
from meshwright.ir.errors import MeshwrightError
from meshwright.ir.text.plain_text import odd_character
from meshwright.ir.text.terminal import Terminal
from meshwright.tools.export.export import TARGETS, export

LIMIT_S = 5.0
"""Of computing."""
WALL_S = 300.0
"""By a clock: the machine may be shared, and its processes paused, but nothing waits for ever."""
LIMIT_KB = 2**20
CODES = (0, 2, 3, 4, 5)
"""Of commands that did what was asked, or said in words why not."""


class Hung(BaseException):
    """A command took longer than it may."""


@dataclass(frozen=True)
class Outcome:
    """What a command did."""

    code: int
    text: str
    problem: str
    """Nothing, or what must not be: a foreign exception, a hang, a jump of memory, an injection."""


def command(*arguments: str, limit_s: float = LIMIT_S) -> Outcome:
    """What `meshwright ARGUMENTS` does."""

    def called() -> int:
        try:
            cli.main(lambda: _command()(list(arguments)))
        except SystemExit as ended:
            return ended.code if isinstance(ended.code, int) else 0
        return 0

    return judged(called, arguments[0], limit_s)


@cache
def _command() -> Any:
    """The command line, which takes long to make."""
    return get_command(cli.app)


def judged(called: Callable[[], int], name: str, limit_s: float = LIMIT_S) -> Outcome:
    """What a call does that gives an exit code; our own errors are 4."""
    printed, problem, code = io.StringIO(), "", 0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.perf_counter()
    try:
        with (
            redirect_stdout(printed),
            redirect_stderr(printed),
            _consoles(printed),
            _alarm(limit_s),
        ):
            code = called()
    except MeshwrightError:
        code = 4
    except Hung:
        problem = f"hangs: {_where()}"
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        problem = f"{type(error).__name__}: {str(error)[:100]!r} at {_where()}"
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    if not problem and grown > LIMIT_KB:
        problem = f"memory grew by {grown // 1024} MiB"
    if not problem and code not in CODES:
        problem = f"exit code {code}"
    text = printed.getvalue()
    if not problem and (odd := next(filter(None, map(odd_character, text.split("\n"))), "")):
        problem = f"prints {odd}"
    seconds = time.perf_counter() - started
    return Outcome(code, text, f"{name}: {problem} ({seconds:.1f} s)" if problem else "")


def _where() -> str:
    frames = traceback.extract_tb(traceback.sys.exc_info()[2])  # type: ignore[attr-defined]
    own = [f for f in frames if "meshwright" in f.filename or "/ir/" in f.filename] or frames
    return " < ".join(f"{Path(f.filename).name}:{f.lineno}" for f in own[:-4:-1])


@contextmanager
def _consoles(printed: io.StringIO) -> Iterator[None]:
    """Consoles that were made when modules were loaded write there too."""
    homes = ((cli, "err"), (race, "out"), (race, "err"))
    before = [getattr(module, name) for module, name in homes]
    for module, name in homes:
        setattr(module, name, Terminal(file=printed))
    try:
        yield
    finally:
        for (module, name), console in zip(homes, before, strict=True):
            setattr(module, name, console)


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    def ring(number: int, frame: Any) -> None:
        raise Hung

    limits = (
        (signal.SIGPROF, signal.ITIMER_PROF, seconds),  # others may use the machine meanwhile
        (signal.SIGALRM, signal.ITIMER_REAL, WALL_S),
    )
    previous = [signal.signal(number, ring) for number, _, _ in limits]
    for _, timer, limit_s in limits:
        signal.setitimer(timer, limit_s)
    try:
        yield
    finally:
        for (number, timer, _), handler in zip(limits, previous, strict=True):
            signal.setitimer(timer, 0.0)
            signal.signal(number, handler)


def exported(plan: Any, cluster: Any) -> Iterator[str]:
    """Problems of the files of all exporters."""
    for target in TARGETS:
        texts: list[str] = []

        def called(target: str = target, texts: list[str] = texts) -> int:
            texts.append(export(plan, target, cluster).text)
            return 0

        if problem := judged(called, f"export {target}").problem:
            yield problem
        for text in texts:
            if problem := injected(target, text):
                yield f"export {target}: {problem}"


_NAMED = re.compile(r"# .*|#SBATCH --job-name=[A-Za-z0-9._-]+")
"""Lines of a shell script that may say what a model is called: comments, and a job's name of
letters and dashes, whatever they spell."""


def injected(target: str, text: str) -> str:
    """Where a text that means harm has become something else than text; or nothing."""
    if target in ("accelerate", "kubeflow", "skypilot"):
        return next((f"key {key}" for key in _keys(yaml.safe_load(text)) if MARK in key), "")
    if target == "torchtitan":
        return python_injection(text)
    if target in ("torchrun", "slurm", "megatron"):
        own = (line for line in text.split("\n") if not _NAMED.fullmatch(line))
        return next((f"line {line!r}" for line in own if MARK in line), "")
    return ""


def python_injection(text: str) -> str:
    """Names and code of a Python file that are none of ours."""
    for node in ast.walk(ast.parse(text)):
        names = (getattr(node, field, None) for field in ("id", "name", "attr", "arg"))
        if any(isinstance(name, str) and MARK in name for name in names):
            return f"name at line {getattr(node, 'lineno', '?')}"
    return ""


def html_injection(page: str) -> str:
    """Elements of a page that are none of ours."""
    found = re.findall(r"<script[^>]*>", page)
    if found != ['<script type="application/json" id="plan-data">', "<script>"]:
        return f"scripts {found}"
    return ""


def _keys(data: Any) -> Iterator[str]:
    if isinstance(data, dict):
        for key, value in data.items():
            yield str(key)
            yield from _keys(value)
    elif isinstance(data, list):
        for value in data:
            yield from _keys(value)

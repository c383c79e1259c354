"""Kernels as Triton's interpreter runs them, which is chosen when Triton is imported.

`printed` runs a module in a fork of a process that has torch and the interpreter loaded: one for
all of a worker's tests, as loading them took as long as some cases.
"""

import json
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np

from meshwright.runtime.world.children import die_with_parent


def printed(module: str, *arguments: str) -> Any:
    """What `python -m MODULE ARGUMENTS` prints as JSON; AssertionError with its errors if it
    fails."""
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    with tempfile.TemporaryDirectory() as name:
        server.stdin.write(json.dumps([name, module, *arguments]) + "\n")
        server.stdin.flush()
        code = server.stdout.readline().strip()
        out, err = (path.read_text() if path.exists() else "" for path in _streams(name))
    assert code == "0", f"{module} ended with {code}: {err[-3000:]}"
    return json.loads(out)


def _streams(folder: str) -> tuple[Path, Path]:
    return Path(folder) / "out", Path(folder) / "err"


@cache
def _server() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", __name__],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def main() -> None:
    """Answers each line, a JSON list of a folder, a module and arguments, with an exit code."""
    die_with_parent()

    import meshwright.codegen.collectives.together
    import meshwright.ir.kernels  # noqa: F401

    _patch_once()
    _multiply_at_once()
    for line in sys.stdin:
        folder, *command = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _become(folder, command)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def _become(folder: str, command: Sequence[str]) -> None:
    code = 1
    try:
        die_with_parent()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, path in enumerate(_streams(folder), 1):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
        sys.argv = [*command]
        runpy.run_module(command[0], run_name="__main__", alter_sys=True)
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _patch_once() -> None:
    """Has what a grid puts in the place of Triton's language stay until the next grid.

    The interpreter puts the same there again at every call of a function by a kernel, for which it
    looks through all names of the language: half of the time of most cases.
    """
    from triton.runtime import interpreter as triton

    patch, run = triton._patch_lang, triton.GridExecutor.__call__
    patched: set[str] = set()

    @cache
    def languages(function: FunctionType) -> frozenset[str]:
        both = {"language": triton.tl, "core": triton.tl.core}
        seen = {id(value) for value in function.__globals__.values()}
        return frozenset(name for name, module in both.items() if id(module) in seen)

    def once(function: FunctionType) -> Any:
        if languages(function) <= patched:
            return triton._LangPatchScope()
        patched.update(languages(function))
        return patch(function)

    def anew(self: Any, *args: Any, **kwargs: Any) -> Any:
        patched.clear()
        return run(self, *args, **kwargs)

    triton._patch_lang, triton.GridExecutor.__call__ = once, anew


def _multiply_at_once() -> None:
    """Has the upper halves of products, of which random numbers are made, taken of whole arrays.

    The interpreter takes each by Python's own integers: a fifth of the time of what has dropout.
    """
    from triton.runtime import interpreter as triton

    triton.np_umulhi_u64 = upper_half


def upper_half(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Bits 64 to 127 of the products of 64-bit numbers, which are taken as without a sign."""
    a, b = (np.asarray(x).astype(np.uint64) for x in (a, b))
    low, half = np.uint64(2**32 - 1), np.uint64(32)
    a_low, a_high, b_low, b_high = a & low, a >> half, b & low, b >> half
    middle = a_high * b_low + (a_low * b_low >> half)
    other = a_low * b_high + (middle & low)
    return a_high * b_high + (middle >> half) + (other >> half)


if __name__ == "__main__":
    main()

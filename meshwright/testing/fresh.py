"""Python in a process where meshwright was not imported yet, without the seconds that torch takes.

For what is decided once in a process, such as the folders that environment variables name. Such
processes are forked from one that has imported what others than we have written, and nothing else.
Triton is among it, so TRITON_INTERPRET, which is read when it is imported, has no effect.
"""

import gc
import os
import runpy
import subprocess
import sys
import tempfile
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType

IMPORTED = (
    "torch", "torch._dynamo", "torch.distributed", "torch.export", "networkx", "pydantic", "typer",
    "rich.console", "rich.table", "yaml", "safetensors.torch", "psutil",
    "ortools.math_opt.python.mathopt", "ortools.sat.python.cp_model",
)  # fmt: skip
"""What programs of ours import of others."""


def python(
    *arguments: str, timeout_s: float = 400.0, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs `python ARGUMENTS`, which begin with `-c TEXT` or `-m MODULE`, and waits for it.

    `environment`, beside this process's, is set before anything of ours is imported. RuntimeError
    if it has not ended after `timeout_s`.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTED))
    with tempfile.TemporaryDirectory() as name:
        said = Path(name)
        process = context.Process(
            target=_main, args=(arguments, {**os.environ, **environment}, Path.cwd(), said)
        )
        process.start()
        process.join(timeout_s)
        late = process.exitcode is None
        process.kill()
        process.join()
        out, err = (_read(said / stream) for stream in ("out", "err"))
    if late:
        raise RuntimeError(f"{arguments} had not ended after {timeout_s:g} s: {err}")
    return subprocess.CompletedProcess(arguments, process.exitcode or 0, out, err)


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _main(
    arguments: tuple[str, ...], environment: dict[str, str], folder: Path, said: Path
) -> None:
    gc.freeze()  # else each collection goes through all that others have written, too
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(said / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    kind, what, *more = arguments
    sys.argv = [what if kind == "-m" else kind, *more]
    if kind == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(what, "<string>", "exec"), vars(main))

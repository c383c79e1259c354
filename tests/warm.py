"""Commands (`meshwright`, `python`, `torchrun`) as forks of a process that has loaded all.

A Python of its own takes seconds to load torch, a fork a tenth of one. What starts them, a shell or
a program, finds them first in its PATH, and what they start again by `sys.executable` is such a
fork, too. Where ranks are killed, or what is loaded matters, a test takes processes of their own.
"""

import importlib
import json
import os
import runpy
import select
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType

import torch

from meshwright.runtime.world.children import die_with_parent
from meshwright.testing.fresh import IMPORTED

NAMES = ("meshwright", "python", "torchrun")
MODULES = {"meshwright": ("-m", "meshwright"), "torchrun": ("-m", "torch.distributed.run")}
IGNORED = ("-u", "-B", "-Xfrozen_modules=off")
"""Options of `python` that change nothing here."""
READ_ONCE = ("TRITON_INTERPRET", "PYTHONHASHSEED")
"""Variables that are read while modules are loaded: a command that has one is no fork."""
LOADED = (
    *IMPORTED, "transformers.models.gpt2.modeling_gpt2",
    "meshwright.cli.run", "meshwright.cli.search",
)  # fmt: skip
MOST_BYTES = 2**20
"""Of what a command is told: its words, folder and environment."""
_PYTHON = sys.executable
CLIENT = """\
#!{python} -IS
import json, os, signal, socket, sys
server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
server.connect({address!r})
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
    signal.signal(number, lambda number, _: server.send(b"%d" % number))
told = json.dumps([{name!r}, sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
socket.send_fds(server, [told], [0, 1, 2])
code = int(server.recv(16) or b"1")
if code < 0:
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""


def load() -> None:
    """Loads what commands need, those for models of transformers and notebooks, too."""
    for name in LOADED:
        importlib.import_module(name)


def shell(*words: str, timeout_s: float = 300.0) -> subprocess.CompletedProcess[str]:
    """Runs one command, and what it starts, to its end."""
    with tempfile.TemporaryDirectory() as folder, warm(Path(folder)) as environment:
        command = [str(Path(folder) / words[0]), *words[1:]]
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=timeout_s
        )


@contextmanager
def warm(folder: Path) -> Iterator[dict[str, str]]:
    """An environment like this process's, in which the commands are forks of it; `folder`, which is
    empty, has them. At the end of the block none of them is left."""
    address = str(folder / "server")
    for name in NAMES:
        path = folder / name
        path.write_text(CLIENT.format(python=sys.executable, address=address, name=name))
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(address)
        listening.listen(64)
        process = get_context("fork").Process(target=_serve, args=(listening, folder))
        process.start()
    try:
        yield os.environ | {"PATH": f"{folder}{os.pathsep}{os.environ.get('PATH', '')}"}
    finally:
        process.kill()
        process.join()


def _serve(listening: socket.socket, folder: Path) -> None:
    """Forks a command for each who asks; whoever is gone has its command killed."""
    die_with_parent()
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    running: dict[int, socket.socket] = {}
    while True:
        ready, _, _ = select.select([listening, woken, *running.values()], [], [])
        if woken in ready:
            os.read(woken, 4096)
            _tell_ends(running)
        if listening in ready:
            asking, _ = listening.accept()
            running[_start(asking, folder)] = asking
        for pid, client in [*running.items()]:
            if client in ready:
                text = client.recv(16)
                os.kill(pid, int(text) if text else signal.SIGKILL)


def _tell_ends(running: dict[int, socket.socket]) -> None:
    while running:
        pid, code = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        with running.pop(pid) as client, suppress(OSError):
            client.send(b"%d" % os.waitstatus_to_exitcode(code))


def _start(asking: socket.socket, folder: Path) -> int:
    """The process of a command."""
    told, files, _, _ = socket.recv_fds(asking, MOST_BYTES, 3)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            die_with_parent()
            for number, file in enumerate(files):
                os.dup2(file, number)
            code = _become(*json.loads(told), folder)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    for file in files:
        os.close(file)
    return pid


def _become(
    name: str, words: list[str], here: str, environment: dict[str, str], folder: Path
) -> int:
    """Runs the command; its exit code."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(here)
    command = [*MODULES.get(name, ()), *words]
    if not environment.keys().isdisjoint(READ_ONCE):
        os.execve(_PYTHON, [_PYTHON, *command], environment)
    sys.stdin, sys.stdout, sys.stderr = (
        open(number, mode, closefd=False) for number, mode in enumerate("rww")
    )
    sys.executable = str(folder / "python")
    sys.warnoptions[:] = filter(None, environment.get("PYTHONWARNINGS", "").split(","))
    importlib.reload(warnings)  # pytest keeps them to itself
    for name in [name for name in sys.modules if name.startswith("matplotlib")]:
        del sys.modules[name]  # whether pictures are shown is settled when it is loaded
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", "1")))
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    try:
        _run(deque(command), here)
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        return ended.code if isinstance(ended.code, int) else int(bool(ended.code))
    return 0


def _run(words: deque[str], here: str) -> None:
    """What `python WORDS` does."""
    while words[0] in IGNORED:
        words.popleft()
    kind = words.popleft()
    match kind:
        case "-m":
            module = words.popleft()
            sys.argv = [module, *words]
            sys.path.insert(0, here)
            if module in sys.modules and not hasattr(sys.modules[module], "__path__"):
                del sys.modules[module]  # runpy warns of it
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        case "-c" | "-":
            text = words.popleft() if kind == "-c" else sys.stdin.read()
            sys.argv = [kind, *words]
            sys.path.insert(0, here)
            sys.modules["__main__"] = main = ModuleType("__main__")
            exec(compile(text, "<string>", "exec"), vars(main))
        case _:
            sys.argv = [kind, *words]
            sys.path.insert(0, str(Path(kind).resolve().parent))
            runpy.run_path(kind, run_name="__main__")

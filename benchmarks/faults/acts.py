"""What befalls ranks and nodes, and what shall become of the job."""

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist
from torch import Tensor

RANKS = 3
SLOWER = 4
WHERE = "FAULT_FOLDER"
"""The variable that names the folder of a run."""
_LAST_S = 0.02
"""After the batch was given out: within the step, mostly."""


def _raise(x: Tensor) -> None:
    raise ArithmeticError("the seventh seal")


def _raise_in_step(x: Tensor) -> None:
    thread = ctypes.c_ulong(threading.get_ident())
    raising = ctypes.pythonapi.PyThreadState_SetAsyncExc
    threading.Timer(_LAST_S, raising, (thread, ctypes.py_object(ArithmeticError))).start()


def _raise_in_handler(x: Tensor) -> None:
    def handler(number: int, frame: object) -> None:
        raise ArithmeticError("in a handler")

    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, _LAST_S)


def _segfault(x: Tensor) -> None:
    ctypes.string_at(0)


def _hold_interpreter(x: Tensor) -> None:
    ctypes.PyDLL(None).sleep(1000)


def _signal(name: str) -> Callable[[Tensor], None]:
    return lambda x: os.kill(os.getpid(), signal.Signals[name])


def _hang(x: Tensor) -> None:
    time.sleep(1000)


def _leave(x: Tensor) -> None:
    os._exit(0)


def _abort_group(x: Tensor) -> None:
    dist.destroy_process_group()


def _nan(x: Tensor) -> None:
    x[3, 2] = float("nan")


def _kill_while_saving(x: Tensor) -> None:
    from meshwright.runtime.checkpoint import parts

    def half(boxes: object, path: Path) -> None:
        path.write_bytes(b"half of it")
        os.kill(os.getpid(), signal.SIGKILL)

    parts.write = half  # type: ignore[assignment]


def _no_room(x: Tensor) -> None:
    from meshwright.runtime.checkpoint import parts

    def full(boxes: object, path: Path) -> None:
        raise OSError(28, "No space left on device")

    parts.write = full  # type: ignore[assignment]


def _damage(x: Tensor) -> None:
    """The newest checkpoint, and then this rank dies."""
    folder = Path(os.environ[WHERE]) / "saved"
    newest = folder / (folder / "latest").read_text().strip()
    content = bytearray((newest / "part-00000.safetensors").read_bytes())
    content[-5] ^= 1
    (newest / "part-00000.safetensors").write_bytes(content)
    os.kill(os.getpid(), signal.SIGKILL)


def _kill_all(x: Tensor) -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(1000)


def _kill_node(x: Tensor) -> None:
    """All of its processes at once, as if its power were gone."""
    supervisor, own = psutil.Process(os.getppid()), os.getpid()
    for process in (supervisor, *supervisor.children()):
        if process.pid != own:
            process.kill()
    os.kill(own, signal.SIGKILL)


def _stop_node(x: Tensor) -> None:
    """Its supervisor alone: connections stay, and nobody answers."""
    os.kill(os.getppid(), signal.SIGSTOP)


def _grow_slow(x: Tensor) -> None:
    """From here on each action takes four times as long."""
    from meshwright.runtime.step.executor import Executor

    take = Executor._take

    def slow(self: Executor, *given: Any) -> Any:
        began = time.perf_counter()
        made = take(self, *given)
        time.sleep((SLOWER - 1) * (time.perf_counter() - began))
        return made

    Executor._take = slow  # type: ignore[method-assign]


def _end_node(x: Tensor) -> None:
    os.kill(os.getppid(), signal.SIGTERM)


@dataclass(frozen=True)
class Fault:
    """One kind."""

    act: Callable[[Tensor], None]
    cause: str
    """Of the text that names the cause."""
    places: frozenset[tuple[int, int]] = frozenset({(0, 1)})
    """Start and rank."""
    code: int = 0
    """Of the run in the end."""
    more: tuple[str, ...] = ()
    """Options of `meshwright run`."""
    exact: bool = True
    """Whether steps have the losses of a run without a fault; all are taken if it ends with 0."""
    nodes: int = 0
    """Of a job on so many; 0: on this machine alone."""
    comes_back: bool = False
    """Whether the node that has gone is started again."""
    wakes: bool = False
    """Whether the node that was stopped goes on, once the other one trains."""
    runs_again: bool = False
    """Whether somebody starts it again, as all of it was killed."""
    pause_s: float = 0.0
    """Of each later batch, so that there is time for that."""
    saves_every: int = 2
    """Steps, on the disk."""
    in_memory: bool = False
    """Whether it goes on from what is in the memory of nodes alone. Each earlier batch takes half a
    second then, so that there is something."""
    steps: int = 12
    wide: bool = False
    """Whether it is of the model that computes for long."""
    relieved: bool = False
    """Whether the job is to go on with a plan whose steps are shorter."""


def _at(*places: tuple[int, int]) -> frozenset[tuple[int, int]]:
    return frozenset(places)


_KILLED = "rank 1 was killed by SIGKILL, in step 6"
_EVERYONE = _at(*((0, rank) for rank in range(RANKS)))
FAULTS: Mapping[str, Fault] = {
    "none": Fault(lambda x: None, ""),
    "exception": Fault(_raise, "rank 1, outside a step, after step 5: ArithmeticError: the"),
    "exception in the step": Fault(_raise_in_step, "ArithmeticError"),
    "exception in a handler": Fault(_raise_in_handler, "in a handler"),
    "the same exception twice": Fault(
        _raise, "the seventh seal", _at((0, 1), (1, 1)), code=70, exact=False),
    "abort": Fault(lambda x: os.abort(), "rank 1 was killed by SIGABRT, in step 6"),
    "segfault": Fault(_segfault, "rank 1 was killed by SIGSEGV, in step 6"),
    "killed": Fault(_signal("SIGKILL"), _KILLED),
    "killed rank 0": Fault(
        _signal("SIGKILL"), "rank 0 was killed by SIGKILL, in step 6", _at((0, 0))),
    "killed two": Fault(
        _signal("SIGKILL"), "(and rank 2 by SIGKILL)", _at((0, 1), (0, 2))),
    "killed twice": Fault(_signal("SIGKILL"), _KILLED, _at((0, 1), (1, 1))),
    "killed while saving": Fault(_kill_while_saving, "rank 1 was killed by SIGKILL, in step"),
    "killed, newest damaged": Fault(_damage, _KILLED),
    "killed all": Fault(_kill_all, "", code=137, runs_again=True),
    "SIGTERM to a rank": Fault(_signal("SIGTERM"), ""),
    "SIGINT to a rank": Fault(_signal("SIGINT"), ""),
    "stopped": Fault(_signal("SIGSTOP"), "rank 1 died or was stopped, in step 6"),
    "interpreter held": Fault(_hold_interpreter, "rank 1 died or was stopped, in step 6"),
    "hang in a loader": Fault(
        _hang, "rank 1, outside a step, after step 5: no progress", more=("--hang", "5")),
    "left with 0": Fault(_leave, "rank 1 left with exit code 0, in step 6"),
    "group destroyed": Fault(_abort_group, "rank 1"),
    "disk full": Fault(_no_room, "No space left on device", code=4, exact=False),
    "NaN, stop": Fault(_nan, "step 6: the loss is nan", _EVERYONE, code=4, exact=False),
    "NaN, skip": Fault(
        _nan, "", _EVERYONE, more=("--on-nonfinite", "skip"), exact=False),
    "NaN, back": Fault(
        _nan, "", _EVERYONE, more=("--on-nonfinite", "back"), exact=False),
    "none, wide model": Fault(
        lambda x: None, "", steps=120, wide=True, saves_every=10**6),
    "slow rank": Fault(
        _grow_slow, "rank 1 (device 1) takes ", _at(*((start, 1) for start in range(9))),
        steps=120, wide=True, relieved=True, saves_every=10**6),
    "node killed": Fault(_kill_node, "node 1 is gone", _at((0, 2)), nodes=2),
    "one node of three killed, the disk has nothing": Fault(
        _kill_node, "node 1 is gone", _at((0, 1)), nodes=3, saves_every=10**6, in_memory=True),
    "leading node killed": Fault(_kill_node, "", _at((0, 0)), nodes=2),
    "node asked to end": Fault(_end_node, "", _at((0, 2)), nodes=2),
    "node killed, and back": Fault(
        _kill_node, "node 1 is gone", _at((0, 2)), nodes=2, comes_back=True, pause_s=2.5),
    "leading node stopped, and goes on": Fault(
        _stop_node, "node 0 leads no more", _at((0, 0)), nodes=2, wakes=True, pause_s=2.5),
}  # fmt: skip
BASES = {False: "none", True: "none, wide model"}
"""Whose losses those of the others are compared with, by whether they are of the wide model."""

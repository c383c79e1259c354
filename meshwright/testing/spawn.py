"""Runs a function on several forked ranks over Gloo, for tests."""

import ctypes
import faulthandler
import gc
import multiprocessing
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from meshwright.runtime.job.handshake import code_hash

PR_SET_PDEATHSIG = 1


class RankFailed(AssertionError):
    """One or more ranks raised, died or hung; the message holds their tracebacks."""


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout_s: float = 120.0,
    init: bool = True,
) -> list[Any]:
    """What `function(*args)` returns on each of `world_size` forked ranks.

    The ranks form a Gloo group (`dist.get_rank()` says which one), unless `init` is False: then
    `function(rank, store_file, *args)` is called instead. All are gone when this returns.
    """
    code_hash()  # which ranks then need not find out each
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        context = multiprocessing.get_context("fork")
        pipes, processes = [], []
        for rank in range(world_size):
            reader, writer = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank_main,
                args=(rank, world_size, store, init, writer, timeout_s, function, args),
                daemon=True,
            )
            process.start()
            writer.close()
            pipes.append(reader)
            processes.append(process)
        try:
            return _collect(pipes, processes, timeout_s)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()


def alone(function: Callable[..., Any], *args: Any) -> Any:
    """What `function(*args)` returns in a forked child.

    For whatever runs a backward: on CUDA builds of torch, autograd's threads, once started in the
    parent, make the backward of every later forked rank fail.
    """
    return run_ranks(1, function, *args)[0]


def _rank_main(
    rank: int,
    world_size: int,
    store: str,
    init: bool,
    writer: Connection,
    timeout_s: float,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    # A parent that is killed takes its ranks along.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    torch.set_num_threads(1)
    gc.freeze()  # else each collection goes through all that its parent has made, too
    # A rank that hangs says where, before it is killed.
    faulthandler.dump_traceback_later(0.9 * timeout_s, file=2)
    try:
        if init:
            dist.init_process_group(
                "gloo", store=FileStore(store, world_size), rank=rank, world_size=world_size
            )
            result = function(*args)
        else:
            result = function(rank, store, *args)
        message = pickle.dumps((True, result))
    except BaseException:
        message = pickle.dumps((False, traceback.format_exc()))
    writer.send_bytes(message)
    # Others may still be reading from this rank: leave together.
    if init and dist.is_initialized() and message and pickle.loads(message)[0]:
        dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()


def _collect(
    pipes: list[Connection], processes: Sequence[BaseProcess], timeout_s: float
) -> list[Any]:
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    deadline = time.monotonic() + timeout_s
    open_ranks = {pipe: rank for rank, pipe in enumerate(pipes)}
    while open_ranks:
        ready = wait(list(open_ranks), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            late = sorted(open_ranks.values())
            if not failures:
                failures |= dict.fromkeys(late, f"still running after {timeout_s:g} s")
            break
        for pipe in ready:
            rank = open_ranks.pop(pipe)  # type: ignore[call-overload]
            _receive(pipe, rank, processes[rank], results, failures)  # type: ignore[arg-type]
        if failures:  # others may fail as a consequence: give them a moment, then stop
            deadline = min(deadline, time.monotonic() + 1.0)
    if failures:
        lines = [f"rank {rank}: {text}" for rank, text in failures.items()]
        raise RankFailed("\n".join(lines))
    return [results[rank] for rank in range(len(pipes))]


def _receive(
    pipe: Connection,
    rank: int,
    process: BaseProcess,
    results: dict[int, Any],
    failures: dict[int, str],
) -> None:
    try:
        good, payload = pickle.loads(pipe.recv_bytes())
    except EOFError:
        process.join(timeout=5.0)
        failures[rank] = f"died with exit code {process.exitcode}"
        return
    if good:
        results[rank] = payload
    else:
        failures[rank] = payload

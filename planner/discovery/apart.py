"""Tries an op in a process of its own: a kernel that does not check its operands may crash it."""

import faulthandler
import multiprocessing
import os
from multiprocessing.connection import Connection

import torch

from meshwright.planner.discovery.found import Cut, Found
from meshwright.planner.discovery.probe import explore
from meshwright.planner.discovery.sample import Sample

CRASHES = 8
"""Splits that may crash or hang before the op is given up."""
HANGS_S = 60.0


def explore_apart(sample: Sample) -> Found:
    """What `explore` finds, without the splits that crash."""
    if "fork" not in multiprocessing.get_all_start_methods():
        return explore(sample)
    skip: list[Cut] = []
    while len(skip) <= CRASHES:
        found, last = _once(sample, tuple(skip))
        if found is not None:
            return found
        if last is None:
            break
        skip.append(last)
    return Found()


def _once(sample: Sample, skip: tuple[Cut, ...]) -> tuple[Found | None, Cut | None]:
    """What was found; or, of a child that did not get so far, the split that it tried last."""
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(writer, sample, skip), daemon=True)
    child.start()
    writer.close()
    last: Cut | None = None
    try:
        while reader.poll(HANGS_S):
            found = reader.recv()
            if isinstance(found, Found):
                return found, last
            last = found
    except EOFError:
        pass
    finally:
        child.kill()
        child.join()
    return None, last


def _child(writer: Connection, sample: Sample, skip: tuple[Cut, ...]) -> None:
    torch.set_num_threads(1)
    # A crash is one of the answers: nobody needs to read about it.
    faulthandler.disable()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    writer.send(explore(sample, skip, about=writer.send))

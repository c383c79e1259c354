"""Tries an op in a process of its own: a kernel that does not check its operands may crash it."""

import faulthandler
import multiprocessing
import os
from collections.abc import Mapping
from multiprocessing.connection import Connection

import torch

from meshwright.planner.discovery.found import DimCut, FoundRule
from meshwright.planner.discovery.probe import explore
from meshwright.planner.discovery.sample import TrialSample

CRASHES = 8
"""Splits that may crash or hang before the op is given up."""
HANGS_S = 60.0


def explore_apart(sample: TrialSample) -> FoundRule:
    """What `explore` finds, without the splits that crash.

    A split may do its harm unseen and crash a later one: it is guilty that crashes a process in
    which nothing was tried before.
    """
    if "fork" not in multiprocessing.get_all_start_methods():
        return explore(sample)
    known: dict[DimCut, bool] = {}
    crashes = 0
    while crashes <= CRASHES:
        found, told, last = _once(sample, known)
        if found is not None:
            return found
        known |= told
        if told:
            continue
        if last is None:
            break
        known[last] = False
        crashes += 1
    return FoundRule()


def _once(
    sample: TrialSample, known: Mapping[DimCut, bool]
) -> tuple[FoundRule | None, dict[DimCut, bool], DimCut | None]:
    """What was found; or, of a child that did not get so far, which splits it has seen to hold or
    not, and the one that it tried last."""
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(writer, sample, known), daemon=True)
    child.start()
    writer.close()
    told: dict[DimCut, bool] = {}
    last: DimCut | None = None
    try:
        while reader.poll(HANGS_S):
            heard = reader.recv()
            if isinstance(heard, FoundRule):
                return heard, told, last
            last, holds = heard
            if holds is not None:
                told[last] = holds
    except EOFError:
        pass
    finally:
        child.kill()
        child.join()
    return None, told, last


def _child(writer: Connection, sample: TrialSample, known: Mapping[DimCut, bool]) -> None:
    torch.set_num_threads(1)
    # A crash is one of the answers: nobody needs to read about it.
    faulthandler.disable()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    writer.send(explore(sample, known, about=lambda *heard: writer.send(heard)))

"""Graphs of models of the zoo, each traced once for all tests of a run.

A trace takes a third of a second and more, and many tests need one of the same few. A graph is
frozen: nobody changes it for others. Workers, and ranks and others that they fork, find those of
the zoo's own models in a folder of the run. Tests of another model or example trace themselves.
"""

import os
import pickle
from functools import cache
from pathlib import Path

import torch

from meshwright.ir.graph.graph import Graph
from meshwright.ir.text.digest import digest
from meshwright.ir.trace.trace import trace
from meshwright.testing.models import CASES, ModelCase
from tests.run_folder import FOLDER


def zoo_graph(
    case: ModelCase, batch: int | None = None, dtype: torch.dtype = torch.float64,
    precision: str = "", kernels: tuple[str, ...] = (),
) -> Graph:  # fmt: skip
    """What `case` is traced to, with a batch of its own size or of `batch` samples."""
    return _traced(case, batch or case.batch_size, dtype, precision, kernels)


@cache
def _traced(
    case: ModelCase, batch: int, dtype: torch.dtype, precision: str,
    kernels: tuple[str, ...],
) -> Graph:  # fmt: skip
    folder = os.environ.get(FOLDER)
    # Others may have a name of the zoo's, or of each other.
    if not folder or CASES.get(case.name) is not case:
        return _anew(case, batch, dtype, precision, kernels)
    key = digest([case.name, batch, str(dtype), precision, kernels])
    path = Path(folder) / key
    if path.exists():
        found: Graph = pickle.loads(path.read_bytes())
        return found
    graph = _anew(case, batch, dtype, precision, kernels)
    half = path.with_suffix(f".{os.getpid()}")  # others find all of it or nothing
    half.write_bytes(pickle.dumps(graph))
    half.replace(path)
    return graph


def _anew(
    case: ModelCase, batch: int, dtype: torch.dtype, precision: str,
    kernels: tuple[str, ...],
) -> Graph:  # fmt: skip
    example = case.example(batch, dtype=dtype)
    return trace(case.model(dtype), example, case.loss_fn, precision=precision, kernels=kernels)

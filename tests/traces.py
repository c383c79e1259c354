"""Graphs of models of the zoo, each traced once for all tests of a worker.

A trace takes a third of a second and more, and many tests need one of the same few. A graph is
frozen: nobody changes it for others. Tests of another model or example trace themselves.
"""

from functools import cache

import torch

from meshwright.ir.graph.graph import Graph
from meshwright.ir.trace.trace import trace
from meshwright.testing.models import ModelCase


def zoo_graph(
    case: ModelCase, batch: int | None = None, dtype: torch.dtype = torch.float64,
    precision: str = "",
) -> Graph:  # fmt: skip
    """What `case` is traced to, with a batch of its own size or of `batch` samples."""
    return _traced(case, batch or case.batch_size, dtype, precision)


@cache
def _traced(case: ModelCase, batch: int, dtype: torch.dtype, precision: str) -> Graph:
    example = case.example(batch, dtype=dtype)
    return trace(case.model(dtype), example, case.loss_fn, precision=precision)

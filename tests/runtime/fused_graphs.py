"""Graphs with fused kernels."""

from functools import cache

import meshwright as mw
from meshwright.ir.graph.graph import Graph
from meshwright.ir.kernels import KERNELS
from meshwright.testing.models import CASES

BATCH = 12


@cache
def graph_of(name: str) -> Graph:
    case = CASES[name]
    return mw.trace(
        case.model(), case.example(), case.loss_fn, global_batch_size=BATCH, kernels=KERNELS
    )

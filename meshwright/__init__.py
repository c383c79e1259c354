"""meshwright searches the fastest way to train a PyTorch model on a cluster, shows it, and runs it.

plan = mw.search(model, cluster)
job = mw.compile(model, plan)
loss = job.step(batch)
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshwright.costmodel.measure import measure_local as measure_local
    from meshwright.ir.annotate import replicate as replicate
    from meshwright.ir.annotate import split as split
    from meshwright.ir.annotate import stage as stage
    from meshwright.ir.cluster import Cluster as Cluster
    from meshwright.ir.errors import CheckFailed as CheckFailed
    from meshwright.ir.errors import Infeasible as Infeasible
    from meshwright.ir.errors import MeshwrightError as MeshwrightError
    from meshwright.ir.errors import MismatchError as MismatchError
    from meshwright.ir.errors import NonFinite as NonFinite
    from meshwright.ir.errors import PlanError as PlanError
    from meshwright.ir.errors import TraceError as TraceError
    from meshwright.ir.graph import Graph as Graph
    from meshwright.ir.plan import Plan as Plan
    from meshwright.ir.trace import trace as trace
    from meshwright.logs import MetricLog as MetricLog
    from meshwright.planner.complete import complete as complete
    from meshwright.planner.options import SearchOptions as SearchOptions
    from meshwright.planner.search import rank as rank
    from meshwright.planner.search import search as search
    from meshwright.profiling import profile as profile
    from meshwright.racing import race as race
    from meshwright.runtime.job import Job as Job
    from meshwright.runtime.job import compile as compile

__version__ = "0.1.0"

# Loaded on first use, so that looking at a plan does not import torch.
_HOME = {
    "CheckFailed": "ir.errors",
    "Cluster": "ir.cluster",
    "Graph": "ir.graph",
    "Infeasible": "ir.errors",
    "Job": "runtime.job",
    "MeshwrightError": "ir.errors",
    "MetricLog": "logs",
    "MismatchError": "ir.errors",
    "NonFinite": "ir.errors",
    "Plan": "ir.plan",
    "PlanError": "ir.errors",
    "SearchOptions": "planner.options",
    "TraceError": "ir.errors",
    "compile": "runtime.job",
    "complete": "planner.complete",
    "measure_local": "costmodel.measure",
    "profile": "profiling",
    "race": "racing",
    "rank": "planner.search",
    "replicate": "ir.annotate",
    "search": "planner.search",
    "split": "ir.annotate",
    "stage": "ir.annotate",
    "trace": "ir.trace",
}
__all__ = list(_HOME)


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'meshwright' has no attribute {name!r}")
    return getattr(import_module(f"meshwright.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])

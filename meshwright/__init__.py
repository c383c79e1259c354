"""meshwright searches the fastest way to train a PyTorch model on a cluster, shows it, and runs it.

plan = mw.search(model, cluster)
job = mw.compile(model, plan)
loss = job.step(batch)
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshwright.adapters.adapting import adapt as adapt
    from meshwright.adapters.adapting import merge as merge
    from meshwright.adapters.files import load_adapter as load_adapter
    from meshwright.adapters.files import save_adapter as save_adapter
    from meshwright.adapters.quantised_linear import quantise as quantise
    from meshwright.forms.methods import with_method as with_method
    from meshwright.ir.cluster.cluster import Cluster as Cluster
    from meshwright.ir.errors import CheckFailed as CheckFailed
    from meshwright.ir.errors import Infeasible as Infeasible
    from meshwright.ir.errors import MeshwrightError as MeshwrightError
    from meshwright.ir.errors import MismatchError as MismatchError
    from meshwright.ir.errors import NonFinite as NonFinite
    from meshwright.ir.errors import PlanError as PlanError
    from meshwright.ir.errors import TraceError as TraceError
    from meshwright.ir.graph.graph import Graph as Graph
    from meshwright.ir.plan.plan import Plan as Plan
    from meshwright.ir.trace.annotate import replicate as replicate
    from meshwright.ir.trace.annotate import split as split
    from meshwright.ir.trace.annotate import stage as stage
    from meshwright.ir.trace.declared import declare_experts as declare_experts
    from meshwright.ir.trace.declared import experts_by as experts_by
    from meshwright.ir.trace.declared import mix_experts as mix_experts
    from meshwright.ir.trace.trace import trace as trace
    from meshwright.planner.search.complete import complete as complete
    from meshwright.planner.search.options import SearchOptions as SearchOptions
    from meshwright.planner.search.search import rank as rank
    from meshwright.planner.search.search import search as search
    from meshwright.profiling.measure_local import measure_local as measure_local
    from meshwright.profiling.profiling import profile as profile
    from meshwright.profiling.routes import count_routes as count_routes
    from meshwright.profiling.rows import count_rows as count_rows
    from meshwright.running.logs import MetricLog as MetricLog
    from meshwright.runtime.job.by_method import by_method as by_method
    from meshwright.runtime.job.compile import compile as compile
    from meshwright.runtime.job.job import Job as Job
    from meshwright.runtime.job.saver import Saver as Saver
    from meshwright.tools.race.racing import race as race
    from meshwright.tools.report.page import write_report as write_report
    from meshwright.tools.report.trace import write_trace as write_trace

__version__ = "0.1.0"

# Loaded on first use, so that looking at a plan does not import torch.
_HOME = {
    "CheckFailed": "ir.errors",
    "Cluster": "ir.cluster.cluster",
    "Graph": "ir.graph.graph",
    "Infeasible": "ir.errors",
    "Job": "runtime.job.job",
    "MeshwrightError": "ir.errors",
    "MetricLog": "running.logs",
    "MismatchError": "ir.errors",
    "NonFinite": "ir.errors",
    "Plan": "ir.plan.plan",
    "PlanError": "ir.errors",
    "Saver": "runtime.job.saver",
    "SearchOptions": "planner.search.options",
    "TraceError": "ir.errors",
    "adapt": "adapters.adapting",
    "by_method": "runtime.job.by_method",
    "compile": "runtime.job.compile",
    "count_routes": "profiling.routes",
    "count_rows": "profiling.rows",
    "complete": "planner.search.complete",
    "declare_experts": "ir.trace.declared",
    "experts_by": "ir.trace.declared",
    "mix_experts": "ir.trace.declared",
    "load_adapter": "adapters.files",
    "measure_local": "profiling.measure_local",
    "merge": "adapters.adapting",
    "profile": "profiling.profiling",
    "quantise": "adapters.quantised_linear",
    "race": "tools.race.racing",
    "rank": "planner.search.search",
    "replicate": "ir.trace.annotate",
    "save_adapter": "adapters.files",
    "search": "planner.search.search",
    "split": "ir.trace.annotate",
    "stage": "ir.trace.annotate",
    "trace": "ir.trace.trace",
    "with_method": "forms.methods",
    "write_report": "tools.report.page",
    "write_trace": "tools.report.trace",
}
__all__ = list(_HOME)


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'meshwright' has no attribute {name!r}")
    return getattr(import_module(f"meshwright.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])

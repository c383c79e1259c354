"""Figures of a training step under the names that torchtitan gives them."""

from dataclasses import dataclass

import torch

from meshwright.arguments.targets import cluster_of
from meshwright.costmodel.explain.utilisation import Utilisation, step_flops
from meshwright.ir.errors import PlanError
from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan.plan import Plan
from meshwright.ir.plan.tokens import tokens_per_sample
from meshwright.runtime.record.resident import resident_bytes

GIB = 2**30


@dataclass(frozen=True, slots=True)
class StepFigures:
    """One step as a loop sees it."""

    loss: float
    step_s: float
    data_s: float
    """Of it, waiting for the batch."""
    learning_rate: float
    grad_norm: float | None = None


class MetricNames:
    """Turns figures into named metrics. Rates are per device, as torchtitan counts them."""

    def __init__(self, plan: Plan, graph: Graph, device: torch.device) -> None:
        self._world, self._device = plan.world_size, device
        self._tokens_per_sample = tokens_per_sample(plan)
        self._tokens = plan.global_batch_size * self._tokens_per_sample
        self._flops = step_flops(graph)
        self._use = _utilisation(plan, self._flops) if device.type == "cuda" else None

    def of(self, figures: StepFigures, samples: int) -> dict[str, float]:
        """Metrics of a step; `samples` are those trained on, with it."""
        device_s = figures.step_s * self._world
        found = {
            "loss_metrics/global_avg_loss": figures.loss,
            "lr": figures.learning_rate,
            "n_tokens_seen": float(samples * self._tokens_per_sample),
            "throughput(tps)": self._tokens / device_s,
            "tflops": self._flops / device_s / 1e12,
            "time_metrics/end_to_end(s)": figures.step_s,
            "time_metrics/data_loading(s)": figures.data_s,
            "time_metrics/data_loading(%)": 100 * figures.data_s / figures.step_s,
            **memory(self._device),
        }
        if self._use:
            found["mfu(%)"] = 100 * self._use.mfu(figures.step_s)
        return found if figures.grad_norm is None else found | {"grad_norm": figures.grad_norm}


def _utilisation(plan: Plan, flops: float) -> Utilisation | None:
    """Where the plan's cluster is a preset, so that the devices' peak is known."""
    try:
        return Utilisation.on(plan, cluster_of(plan, None), flops)
    except PlanError:
        return None


def memory(device: torch.device) -> dict[str, float]:
    """What the device's allocator holds at most; on CPU, what the process holds now."""
    if device.type != "cuda":
        return {"memory/max_reserved(GiB)": resident_bytes() / GIB}
    stats = torch.cuda.memory_stats(device)
    total = torch.cuda.get_device_properties(device).total_memory
    active, reserved = (stats[f"{kind}_bytes.all.peak"] for kind in ("active", "reserved"))
    return {
        "memory/max_active(GiB)": active / GIB,
        "memory/max_active(%)": 100 * active / total,
        "memory/max_reserved(GiB)": reserved / GIB,
        "memory/max_reserved(%)": 100 * reserved / total,
        "memory/num_alloc_retries": float(stats["num_alloc_retries"]),
        "memory/num_ooms": float(stats["num_ooms"]),
    }

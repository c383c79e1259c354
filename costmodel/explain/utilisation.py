"""How much of what the devices can compute a step uses: model FLOPs, as torchtitan counts them."""

from dataclasses import dataclass

from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan.plan import Plan
from meshwright.ir.precision import precision


def step_flops(graph: Graph) -> float:
    """Of the whole global batch: a backward is twice a forward, what is made again counts not."""
    return 3.0 * sum(op.flops for op in graph.ops)


def peak_flops(plan: Plan, cluster: Cluster) -> float:
    """What the plan's devices reach together at best, by their data sheets, in a second."""
    dtype = precision(plan.precision).products
    ranks = {rank for stage in plan.stages for rank in stage.devices}
    return sum(cluster.device(rank).peak(dtype) for rank in ranks)


@dataclass(frozen=True)
class Utilisation:
    """Of a plan on the machines it is for."""

    plan: Plan
    flops: float
    """Of a step."""
    peak_flops: float
    """Of its devices together, in a second."""

    @classmethod
    def on(cls, plan: Plan, cluster: Cluster, flops: float) -> "Utilisation":
        return cls(plan, flops, peak_flops(plan, cluster))

    @classmethod
    def kept(cls, plan: Plan) -> "Utilisation | None":
        """As the plan's prediction has it; None: it was made by a version that did not say."""
        detail = plan.predicted.detail if plan.predicted else None
        if detail is None or not detail.model_flops or not detail.peak_flops:
            return None
        return cls(plan, detail.model_flops, detail.peak_flops)

    def mfu(self, step_s: float) -> float:
        """Share of the peak that a step of so many seconds uses."""
        return self.flops / step_s / self.peak_flops

    def sentence(self) -> str:
        """What the prediction comes to."""
        assert self.plan.predicted
        step_s = self.plan.predicted.step_s
        each = self.flops / step_s / self.plan.world_size / 1e12
        return (
            f"{each:,.3g} TFLOP/s a device of the model's own work, {self.mfu(step_s):.1%} of the "
            f"devices' peak in {self.plan.precision} (torchtitan's mfu; what is made again counts "
            "not)"
        )

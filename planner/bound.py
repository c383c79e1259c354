"""A step time that no plan of the searched space can beat, by the same cost model.

Every block must be computed for every sample. Its device-seconds are at least those of the best
tensor-parallel size and local batch, without any communication, bubble, recompute, optimizer or
synchronisation; and no more devices can work at a time than there are (or than cores they share).
"""

from collections.abc import Mapping

from meshwright.costmodel.tables import Spot
from meshwright.ir.plan import BlockLayout, ModelMesh
from meshwright.planner.problem import Problem
from meshwright.planner.space import divisors, microbatch_counts, model_meshes


def lower_bound(problem: Problem) -> float:
    """Seconds per step."""
    layouts = {
        (model, variant): {x.pattern: x for x in problem.layouts(model, variant)}
        for model in model_meshes(problem)
        for variant in problem.variants(model)
    }
    work = {
        device: _device_seconds(problem, device, layouts)
        for device in dict.fromkeys(problem.tables.device_names)
    }
    rate = 0.0
    for node in problem.cluster.nodes:
        running = min(len(node.devices), node.cores or len(node.devices))
        fastest = sorted(1 / work[name] for name in node.devices if work[name])
        rate += sum(fastest[-running:])
    return 1 / rate if rate else 0.0


def _device_seconds(
    problem: Problem,
    device: str,
    layouts: Mapping[tuple[ModelMesh, str], Mapping[str, BlockLayout]],
) -> float:
    """Of one step on devices of one type."""
    most = problem.batch // min(microbatch_counts(problem), default=1)
    total = 0.0
    known: dict[tuple[str, tuple[bool, ...]], float] = {}
    for block in problem.graph.blocks:
        # Equal blocks cost the same but where the first reads the batch itself.
        trained = tuple(problem.graph.tensors[name].requires_grad for name in block.inputs)
        if (block.pattern, trained) in known:
            total += known[block.pattern, trained]
            continue
        best = float("inf")
        for (model, _), found in layouts.items():
            for samples in divisors(most):
                spot = Spot(samples, 1, model, device, (), ((),) * len(model))
                cost = problem.tables.block(block, found[block.pattern], spot)
                busy = cost.forward_s - cost.comm_forward_s
                busy += cost.backward_s - cost.comm_backward_s
                best = min(best, busy * spot.model_size * problem.batch / samples)
        known[block.pattern, trained] = best
        total += best
    return total

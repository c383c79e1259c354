"""What of a batch is summed over the job: its loss, and the counts that the loss divides by."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.runtime.job.build import RankParts

if TYPE_CHECKING:
    from meshwright.runtime.job.job import Job


def whole_totals(
    parts: RankParts,
    num_microbatches: int,
    given: Mapping[tuple[int, int], Mapping[str, Tensor]],
    place: Callable[[int, int], None],
) -> dict[int, dict[str, Tensor]]:
    """Per stage, the sums over all micro-batches and dp of what the whole batch decides.

    `place(stage, microbatch)` tells generated code where it is: noise depends on it.
    """
    found: dict[int, dict[str, Tensor]] = {}
    for index, stage in parts.stages.items():
        found[index] = {}
        if stage.program.totals is None:
            continue
        for microbatch in range(num_microbatches):
            place(index, microbatch)
            made = stage.totals(given[index, microbatch])
            for name, value in made.items():
                known = found[index].get(name)
                found[index][name] = value.clone() if known is None else known + value
        group = parts.lines[index].replicas.group
        if group is not None:
            for value in found[index].values():
                dist.all_reduce(value, group=group)
    return found


def whole_loss(job: "Job", local: Tensor | None) -> Tensor:
    """The loss of the global batch on every rank."""
    double = job.graph.tensors[job.graph.loss].dtype == "float64"
    if job.plan.world_size == 1:
        assert local is not None
        return local.detach().to(torch.float64 if double else torch.float32)
    last = len(job.plan.stages) - 1
    own = 0 if job.user_groups is None else job.user_groups.mark()
    total = torch.zeros(2, dtype=torch.float64, device=job.device)
    if own:
        total[1].fill_(own)  # made of a list it would be copied, which waits for the device
    if local is not None and job.parts.lines[last].first_of_replica:
        total[0] += local
    job.progress.at(job.state.step, "loss", "synchronising")
    dist.all_reduce(total)
    if job.user_groups is not None:
        job.user_groups.heard(own * job.plan.world_size, total[1])
    return total[0] if double else total[0].float()

"""What of a batch is summed over the job: its loss, and the counts that the loss divides by."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.codegen.collectives.lone_shares import times
from meshwright.runtime.job.build import RankParts
from meshwright.runtime.step.meetings import LoneReplica

if TYPE_CHECKING:
    from meshwright.runtime.job.job import Job


def whole_totals(
    parts: RankParts,
    num_microbatches: int,
    given: Mapping[tuple[int, int], Mapping[str, Tensor]],
    place: Callable[[int, int], None],
) -> dict[int, dict[str, Tensor]]:
    """Per stage, the sums over all micro-batches and dp of what the whole batch decides. Where
    replicas train alone, they are what they were if all samples were like a replica's own.

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
        lines = parts.lines[index]
        apart = stage.comm.apart if stage.comm.training else None
        group = (lines.replicas if apart is None else lines.shards).group
        for name, value in found[index].items():
            if group is not None:
                dist.all_reduce(value, group=group)
            if apart is not None:  # losses are divided by it, and gradients by the share
                found[index][name] = times(value, (apart[1], apart[0]))
    return found


def whole_loss(job: "Job", local: Tensor | None, replica: LoneReplica | None = None) -> Tensor:
    """The loss of the global batch on every rank; of a lone replica that of its own samples: what
    all found it hears later."""
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
    if replica is not None:
        mine = total[:1].clone()
        replica.ask(job.state.step, own, total)
        found = replica.own_loss(mine)[0]
        return found if double else found.float()
    dist.all_reduce(total)
    if job.user_groups is not None:
        job.user_groups.heard(own * job.plan.world_size, total[1])
    return total[0] if double else total[0].float()

"""Opens every connection between pipeline ranks before the first step.

NCCL makes a pair's communicator when the pair is first used, and each of the two then waits for the
other, whatever else it could do. A rank that asks for a gradient ahead of need would so keep back
the forward that the gradient is made of.
"""

import torch
import torch.distributed as dist

from meshwright.ir.plan.lines import in_order
from meshwright.runtime.world.groups import Groups


def open_pairs(groups: Groups, rank: int, device: torch.device) -> None:
    """Sends one element over each pair of this rank; every rank calls it at the same time."""
    element = torch.zeros(1, device=device)
    for source, target in in_order(groups.by_pair):
        group = groups.between(source, target)
        work = (
            dist.isend(element, target, group=group)
            if source == rank
            else dist.irecv(element, source, group=group)
        )
        assert work is not None
        work.wait()

"""Opens every connection between pipeline ranks before the first step.

NCCL makes a pair's communicator when the pair is first used, and each of the two then waits for the
other, whatever else it could do. A rank that asks for a gradient ahead of need would so keep back
the forward that the gradient is made of.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist

from meshwright.runtime.messages.messages import Message
from meshwright.runtime.messages.ordering import Pair
from meshwright.runtime.world.groups import Groups


def pairs_in_order(messages: Iterable[Message]) -> tuple[Pair, ...]:
    """Lists all pairs that messages need, in one order for the whole job: by the lower rank, the
    higher one, upward first.

    Ranks that meet in an order of pairs that all share cannot wait for each other in a circle.
    """
    pairs = {(m.source, m.target) for m in messages if m.source != m.target}
    return tuple(sorted(pairs, key=lambda pair: (min(pair), max(pair), pair[0] > pair[1])))


def open_pairs(
    messages: Iterable[Message], groups: Groups, rank: int, device: torch.device
) -> None:
    """Sends one element over each pair of this rank; every rank calls it at the same time."""
    element = torch.zeros(1, device=device)
    for source, target in pairs_in_order(messages):
        group = groups.between(source, target)
        work = (
            dist.isend(element, target, group=group)
            if source == rank
            else dist.irecv(element, source, group=group)
        )
        assert work is not None
        work.wait()

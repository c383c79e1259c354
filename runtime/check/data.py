"""The batch that a check takes its step on."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from meshwright.ir.graph.bags import GivenBags, given_bags
from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan.plan import Plan
from meshwright.runtime.step.bags import Bags


def batch_of(
    plan: Plan, graph: Graph, given: Mapping[str, Tensor] | None, *, seed: int = 0
) -> dict[str, Tensor]:
    """A global batch of the plan's shapes by input name, equal on all ranks.

    It is made of the user's samples where there are some; those that are used again are shifted, as
    equal samples would hide which of them a rank has. Else it is random, integers below 2, which
    are legal almost everywhere, in bags of equal lengths.
    """
    generator = torch.Generator().manual_seed(seed)
    found, bags = dict[str, Tensor](), given_bags(graph)
    places = {each.offsets: name for name, each in bags.items()}
    for spec in plan.model.inputs:
        example = None if given is None else given.get(spec.name)
        dtype, shape = getattr(torch, spec.dtype), spec.shape
        if example is not None and not example.is_meta and example.dtype == dtype:
            lies = spec.name in bags or spec.name in places
            found[spec.name] = example.cpu() if lies else _stretched(example.detach().cpu(), shape)
        elif dtype.is_floating_point or dtype.is_complex:
            found[spec.name] = torch.randn(shape, generator=generator, dtype=dtype)
        elif spec.name in places:
            of = next(x for x in plan.model.inputs if x.name == places[spec.name])
            each = of.shape[0] // plan.global_batch_size
            found[spec.name] = (torch.arange(shape[0]) * each).to(dtype)
        else:
            found[spec.name] = torch.randint(0, 2, shape, generator=generator).to(dtype)
    if not bags:
        return found
    any_bags = next(iter(bags.values()))
    known = len(found[any_bags.offsets]) - any_bags.last
    return found | _bags_of(found, bags, [i % known for i in range(plan.global_batch_size)])


def _stretched(example: Tensor, shape: tuple[int, ...]) -> Tensor:
    if tuple(example.shape) == shape or not example.ndim or not len(example):
        return example
    rows = []
    for number in range(shape[0]):
        turn, index = divmod(number, len(example))
        rows.append(example[index].roll(turn, -1) if example.ndim > 1 else example[index])
    return torch.stack(rows)


def first_samples(
    batch: Mapping[str, Tensor], count: int, batch_size: int, bags: Mapping[str, GivenBags]
) -> dict[str, Tensor]:
    """Some of the samples of a batch; `bags`: those of its graph."""
    few = {name: x[:count] if x.shape[:1] == (batch_size,) else x for name, x in batch.items()}
    return few | _bags_of(batch, bags, range(count))


def _bags_of(
    batch: Mapping[str, Tensor], bags: Mapping[str, GivenBags], samples: Sequence[int]
) -> dict[str, Tensor]:
    """What a batch has in bags of some samples, and where."""
    runs, found = [(sample, sample + 1) for sample in samples], dict[str, Tensor]()
    for name, each in bags.items():
        lie = Bags(batch[each.offsets], each.last)
        found[name] = lie.values(batch[name], runs)
        found[each.offsets] = lie.places(runs, len(batch[name]))
    return found

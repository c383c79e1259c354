"""Cases of attention with dropout, and how far the kernel is from what is written out."""

import json
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshwright.codegen.attention import dropped
from meshwright.codegen.collectives.comm import Comm
from meshwright.codegen.sharded.seeds import key_of
from meshwright.ir import launch
from meshwright.ir.random.dropout import factors

P, NAME = 0.25, "op"
AHEAD = 3
"""Samples of the batch before these."""


@dataclass(frozen=True)
class AttentionCase:
    """Shapes, what queries see, and where a rank's part of the chances lies."""

    batch: int
    heads: int
    groups: int
    queries: int
    keys: int
    width: int
    causal: bool = False
    mask: str = ""
    value_width: int = 0
    """0: that of keys."""
    first: int = 0
    sizes: tuple[int, ...] = (-1,)
    strides: tuple[int, ...] = (1,)
    kernel: bool = True
    """Whether there is one for it."""

    @property
    def per_sample(self) -> int:
        return self.heads * self.queries * self.keys

    def of_mask(self) -> Tensor | None:
        """One of `none`, `bool` with a query that sees nothing, `numbers`, `wanted`."""
        shape = self.batch, 1, self.queries, self.keys
        if self.mask == "bool":
            found = torch.rand(shape, generator=_generator(2), device="cpu") < 0.6
            found[0, 0, 2] = False
            return found.to(torch.get_default_device())
        if not self.mask:
            return None
        made = torch.linspace(-2, 2, shape[2] * shape[3], dtype=torch.float64)
        return made.view(shape[2:]).requires_grad_(self.mask == "wanted")


CASES = {
    "causal": AttentionCase(2, 2, 2, 70, 70, 16, causal=True),
    "grouped": AttentionCase(2, 4, 2, 33, 80, 20, first=16),
    "heads_of_a_rank": AttentionCase(
        2, 2, 1, 64, 64, 16, mask="bool", first=2 * 64 * 64, sizes=(-1, 2 * 64 * 64),
        strides=(4 * 64 * 64, 1),
    ),
    "halves_of_rows": AttentionCase(
        1, 2, 2, 4, 10, 16, sizes=(-1, 5), strides=(10, 1), kernel=False
    ),
    "odd": AttentionCase(1, 2, 2, 5, 7, 24, mask="numbers", first=3),
    "narrow_values": AttentionCase(2, 4, 2, 21, 37, 40, causal=True, value_width=24),
    "latent": AttentionCase(1, 2, 2, 5, 7, 192, mask="bool", value_width=128),
    "wide_values": AttentionCase(1, 2, 2, 5, 18, 24, value_width=100),
    "mask_wants_a_gradient": AttentionCase(1, 2, 2, 5, 7, 16, mask="wanted", kernel=False),
    "narrow": AttentionCase(1, 2, 2, 5, 7, 8, kernel=False),
}  # fmt: skip


def _generator(seed: int) -> torch.Generator:
    return torch.Generator("cpu").manual_seed(seed)


def _comm(*, held: bool = False) -> Comm:
    """With `held` a tensor has what its numbers go by, and nothing else."""
    comm = Comm({}, {"tp": 1}, {"tp": 0}, seed=3)
    comm.block, comm.step, comm.sample_offset = "h.1", 2, AHEAD
    if held:
        key = key_of(comm, NAME)
        comm.held = lambda block, op, each: torch.tensor([key, AHEAD * each])
        comm.step = comm.sample_offset = -1
    return comm


def _written_out(
    case: AttentionCase, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> Tensor:
    key, value = (x.repeat_interleave(case.heads // case.groups, 1) for x in (key, value))
    scores = query @ key.mT * case.width**-0.5
    if case.causal:
        mask = torch.ones(case.queries, case.keys, dtype=torch.bool).tril()
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -torch.inf)
    elif mask is not None:
        scores = scores + mask
    sees = (scores > -torch.inf).any(-1, keepdim=True)
    chances = scores.masked_fill(~sees, 0.0).softmax(-1) * sees
    where = case.first + AHEAD * case.per_sample, case.sizes, case.strides
    return chances * factors(chances.detach(), P, key_of(_comm(), NAME), *where) @ value


def errors(name: str, dtype: torch.dtype = torch.float64, *, held: bool = False) -> list[float]:
    """Of the result and gradients, from what is written out in float64, as shares of the largest
    value."""
    case = CASES[name]
    key_shape = case.keys, case.groups, case.width
    shapes = [
        (case.queries, case.heads, case.width),
        key_shape,
        (*key_shape[:2], case.value_width or case.width),
    ]
    operands = [
        torch.randn(case.batch, *shape, generator=_generator(at), device="cpu")
        .to(torch.get_default_device(), dtype).transpose(1, 2).requires_grad_()
        for at, shape in enumerate(shapes)
    ]  # fmt: skip
    exact = [x.detach().double().requires_grad_() for x in operands]
    mask = case.of_mask()
    given = mask if mask is None or mask.dtype == torch.bool else mask.to(dtype)
    made = dropped.attention(
        _comm(held=held), *operands, NAME, given, P, case.causal, None, case.heads > case.groups, 1,
        per_sample=case.per_sample, first=case.first, sizes=case.sizes,
        strides=case.strides,
    )  # fmt: skip
    right = _written_out(case, *exact, mask)
    weight = torch.linspace(-1, 1, made.numel(), dtype=torch.float64).view(made.shape)
    more = [mask] if case.mask == "wanted" else []
    grads = torch.autograd.grad((made * weight).sum(), [*operands, *more])
    wanted = torch.autograd.grad((right * weight).sum(), [*exact, *more])
    return [
        ((one.double() - other).abs().max() / other.abs().max()).item()
        for one, other in zip((made, *grads), (right, *wanted), strict=True)
    ]


def under() -> dict[str, Any]:
    found = {
        name + " held" * held: errors(name, held=held) for name in CASES for held in (False, True)
    }
    return {"errors": found, "taken": [*launch.TAKEN]}


if __name__ == "__main__":
    print(json.dumps(under()))

"""FSDP2 sees through the kernels' operators: sharded models that call them train as plain ones."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from meshwright.testing.spawn import alone, run_ranks
from tests.codegen.kernels.cases import OPERATORS

RANKS, STEPS, BATCH, TOKENS, WORDS = 2, 4, 4, 5, 11
HEADS, HEAD, WIDTH, INNER = 3, 4, 12, 7
"""Rows that two ranks share unevenly; of a parameter with one element one of them has nothing."""


def _first(made: Any) -> Tensor:
    """What an operator makes, without what it keeps for its backward."""
    return made[0] if isinstance(made, tuple) else made


@dataclass(frozen=True)
class Calls:
    """The kernels' operators, or what they stand for in plain torch."""

    ours: bool

    def __call__(self, name: str, *given: Any) -> Any:
        return OPERATORS[name][0 if self.ours else 1](*given)


def _weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape, dtype=torch.float64) * 0.3)


class Block(nn.Module):
    """Rotated heads, SwiGLU and GELU, each behind a norm and added to what came in."""

    def __init__(self, calls: Calls) -> None:
        super().__init__()
        self.calls = calls
        self.heads, self.gate, self.up = (
            _weight(WIDTH, WIDTH),
            _weight(INNER, WIDTH),
            _weight(INNER, WIDTH),
        )
        self.down, self.wide, self.back = (
            _weight(WIDTH, INNER),
            _weight(INNER, WIDTH),
            _weight(WIDTH, INNER),
        )
        self.bias, self.scale = _weight(INNER), _weight(1)
        self.gains = nn.ParameterList([_weight(WIDTH) for _ in range(3)])
        self.shift = _weight(WIDTH)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        call = self.calls
        normed = _first(call("rms_norm", x, self.gains[0], 1e-6))
        split = (normed @ self.heads.T).view(*x.shape[:-1], HEADS, HEAD).transpose(1, 2)
        turned = _first(call("rotary", split, cos, sin)).transpose(1, 2).reshape(x.shape)
        x, normed, *_ = call("add_rms_norm", x, turned * self.scale, self.gains[1], 1e-6)
        shared = _first(call("swiglu", normed @ self.gate.T, normed @ self.up.T)) @ self.down.T
        x, normed, *_ = call("add_layer_norm", x, shared, self.gains[2], self.shift, 1e-5)
        return x + _first(call("bias_gelu", normed @ self.wide.T, self.bias, True)) @ self.back.T


class Model(nn.Module):
    def __init__(self, calls: Calls) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.calls = calls
        self.words = _weight(WORDS, WIDTH)
        self.blocks = nn.ModuleList([Block(calls) for _ in range(2)])
        angle = torch.rand(1, TOKENS, HEAD // 2, dtype=torch.float64).repeat(1, 1, 2)
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """The loss of a token, on the average."""
        x = self.words[ids]
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = (x @ self.words.T).flatten(0, 1)
        return (
            _first(self.calls("cross_entropy_total", logits, labels.flatten(), -100)) / ids.numel()
        )


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adamw": partial(torch.optim.AdamW, lr=0.01),
}


def _steps(model: nn.Module, optimizer: str, rank: int, ranks: int) -> Iterator[float]:
    """The loss of each step on a rank's samples."""
    step = OPTIMIZERS[optimizer](model.parameters())
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        ids, labels = torch.randint(WORDS, (2, BATCH, TOKENS), generator=generator).chunk(ranks, 1)[
            rank
        ]
        loss = model(ids, labels)
        loss.backward()
        step.step()
        step.zero_grad()
        yield loss.item()


def _trained(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach()
        for name, p in model.named_parameters()
    }


def plain(optimizer: str) -> tuple[list[float], dict[str, Tensor]]:
    model = Model(Calls(ours=False))
    return list(_steps(model, optimizer, 0, 1)), _trained(model)


def sharded(optimizer: str) -> tuple[list[float], dict[str, Tensor]]:
    return _sharded(Model(Calls(ours=True)), optimizer)


def compiled(optimizer: str) -> tuple[list[float], dict[str, Tensor]]:
    """Each block is one graph, in which the operators are calls."""
    seen: set[str] = set()

    def backend(graph: torch.fx.GraphModule, given: list[Tensor]) -> Callable[..., Any]:
        seen.update(str(node.target) for node in graph.graph.nodes)
        made: Callable[..., Any] = aot_eager(graph, given)
        return made

    aot_eager = torch._dynamo.lookup_backend("aot_eager")
    model = Model(Calls(ours=True))
    for block in model.blocks:
        block.compile(backend=backend, fullgraph=True)
    found = _sharded(model, optimizer)
    called = {name for name in OPERATORS if f"meshwright.{name}.default" in seen}
    assert called == {"rms_norm", "rotary", "add_rms_norm", "swiglu", "add_layer_norm", "bias_gelu"}
    return found


def _sharded(model: Model, optimizer: str) -> tuple[list[float], dict[str, Tensor]]:
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    return list(_steps(model, optimizer, dist.get_rank(), RANKS)), _trained(model)


@pytest.mark.parametrize(
    ("optimizer", "train"), [("sgd", sharded), ("adamw", sharded), ("adamw", compiled)]
)
def test_sharded_as_plain(optimizer, train):
    losses, wanted = alone(plain, optimizer)
    assert losses[-1] < losses[0]
    ranks = run_ranks(RANKS, train, optimizer)
    for step, loss in enumerate(losses):
        assert abs(sum(own[step] for own, _ in ranks) / RANKS - loss) <= 1e-12 * loss
    for _, found in ranks:
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=1e-11, atol=1e-12)

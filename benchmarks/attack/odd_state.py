"""Odd models: state that forward keeps in Python, hooks, and code that reaches the model from
outside."""

import random
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from benchmarks.attack.odd_nets import Net

Hidden = Callable[[Any, Tensor], Tensor]
COUNT = 0
TABLES: dict[int, Tensor] = {}


class Stateful(Net):
    """`rule` is what happens between the linears; it may keep what it likes in the module."""

    def __init__(self, rule: Hidden, **state: Any) -> None:
        super().__init__()
        self.rule = rule
        for name, value in state.items():
            setattr(self, name, value)

    def between(self, h: Tensor) -> Tensor:
        return self.rule(self, h)


def counter(net: Any, h: Tensor) -> Tensor:
    net.calls += 1
    return h * net.calls


def counter_in_dict(net: Any, h: Tensor) -> Tensor:
    net.state["n"] += 1
    return h * net.state["n"]


def late_branch(net: Any, h: Tensor) -> Tensor:
    net.calls += 1
    return h * 2 if net.calls > 1000 else h


def late_branch_of_list(net: Any, h: Tensor) -> Tensor:
    net.seen.append(float(len(net.seen)))
    return h * 2 if len(net.seen) > 100 else h


def late_by_product(net: Any, h: Tensor) -> Tensor:
    net.calls += 1
    return h * (1 + net.calls // 1000)


def warm_up(net: Any, h: Tensor) -> Tensor:
    net.calls += 1
    return h * min(net.calls / 100, 1.0)


def only_logged(net: Any, h: Tensor) -> Tensor:
    net.calls += 1
    if net.calls % 100 == 0:
        net.log = f"call {net.calls}"
    return torch.tanh(h)


def toggled(net: Any, h: Tensor) -> Tensor:
    net.flag = not net.flag
    return h * 2 if net.flag else h


def text(net: Any, h: Tensor) -> Tensor:
    net.mode = "second" if net.mode == "first" else "third"
    return h * len(net.mode)


def past(net: Any, h: Tensor) -> Tensor:
    before, net.past = net.past, h.detach()
    return h if before is None else h + before


def list_of_past(net: Any, h: Tensor) -> Tensor:
    net.seen.append(h.detach())
    return h + torch.stack(net.seen).mean(0)


def list_not_read(net: Any, h: Tensor) -> Tensor:
    net.seen.append(h.detach().mean())
    return torch.tanh(h)


def average_not_read(net: Any, h: Tensor) -> Tensor:
    mean = h.detach().mean()
    net.average = mean if net.average is None else 0.9 * net.average + 0.1 * mean
    return torch.tanh(h)


def set_by_data(net: Any, h: Tensor) -> Tensor:
    if net.scale is None:
        net.scale = h.detach().std(0)
    return h / net.scale


def cached_mask(net: Any, h: Tensor) -> Tensor:
    if net.mask is None:
        net.mask = torch.zeros(8, dtype=torch.float64)
        net.mask[:4] = 1
        net.mask = net.mask.cumsum(0).masked_fill(net.mask == 0, -1)
    return torch.tanh(h * net.mask)


def global_counter(net: Any, h: Tensor) -> Tensor:
    global COUNT
    COUNT += 1
    return h * COUNT


def global_cache(net: Any, h: Tensor) -> Tensor:
    if 8 not in TABLES:
        TABLES[8] = torch.arange(8, dtype=torch.float64)
    return torch.tanh(h * TABLES[8])


@lru_cache
def _table(size: int) -> Tensor:
    return torch.tril(torch.ones(size, size, dtype=torch.float64))


def cached_function(net: Any, h: Tensor) -> Tensor:
    return torch.tanh(h @ _table(8))


def python_noise(net: Any, h: Tensor) -> Tensor:
    return h * random.random()


def layer_drop(net: Any, h: Tensor) -> Tensor:
    return h if random.random() < net.p else torch.tanh(h)


def numpy_noise(net: Any, h: Tensor) -> Tensor:
    return h * float(np.random.rand())


def numpy_drop(net: Any, h: Tensor) -> Tensor:
    return h if np.random.uniform(0, 1) < 0.01 else torch.tanh(h)


def own_generator(net: Any, h: Tensor) -> Tensor:
    return h * net.generator.random()


def clock(net: Any, h: Tensor) -> Tensor:
    return h * (time.time() % 10)


def deadline(net: Any, h: Tensor) -> Tensor:
    return h * 2 if time.time() - net.started > 100 else torch.tanh(h)


def clock_not_read(net: Any, h: Tensor) -> Tensor:
    net.took = time.perf_counter()
    return torch.tanh(h)


def hook_on_hidden(net: Any, h: Tensor) -> Tensor:
    h = torch.tanh(h)
    h.register_hook(lambda g: g * 3)
    return h


def hook_on_node(net: Any, h: Tensor) -> Tensor:
    node: Any = h.grad_fn
    node.register_hook(lambda into, out: tuple(None if g is None else g * 3 for g in into))
    return torch.tanh(h)


def saved_hooks(net: Any, h: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x * 2):
        return h.exp()


def saved_on_host(net: Any, h: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return h.exp()


def retained(net: Any, h: Tensor) -> Tensor:
    h.retain_grad()
    return torch.tanh(h)


def checkpointed(net: Any, h: Tensor) -> Tensor:
    return checkpoint(net.a, torch.tanh(h), use_reentrant=False)  # type: ignore[no-any-return]


def checkpointed_reentrant(net: Any, h: Tensor) -> Tensor:
    return checkpoint(net.a, torch.tanh(h), use_reentrant=True)  # type: ignore[no-any-return]


def hooked(register: Callable[[Any], object]) -> Callable[[], nn.Module]:
    """Builds the net and registers something on it."""

    def build() -> nn.Module:
        net = Net()
        register(net)
        return net

    return build


def triple(module: Any, grads: Any, *_: Any) -> Any:
    """A backward hook: three times the gradients."""
    return tuple(None if g is None else g * 3 for g in grads)


def triple_grad(parameter: Tensor) -> None:
    """A hook after accumulation: three times the gradient."""
    assert parameter.grad is not None
    parameter.grad.mul_(3)


def everywhere(register: str, hook: Callable[..., Any]) -> Callable[[], Callable[[], None]]:
    """Registers a hook on all modules; what it gives takes it away again."""

    def around() -> Callable[[], None]:
        handle = getattr(nn.modules.module, register)(hook)
        return lambda: handle.remove()  # type: ignore[no-any-return]

    return around


def doubled_linear(module: nn.Module, args: Any, output: Any) -> Any:
    """A forward hook of all modules that changes linears."""
    return output * 2 if type(module) is nn.Linear else None


class Logits(Net):
    """The net without its loss."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return self.b(self.between(self.a(x)))  # type: ignore[no-any-return]


def _error(out: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(out, batch["y"])


def weight_in_loss(model: nn.Module) -> Any:
    net: Any = model
    return lambda out, batch: _error(out, batch) + 0.1 * net.a.weight.pow(2).sum()


def all_weights_in_loss(model: nn.Module) -> Any:
    return lambda out, batch: _error(out, batch) + sum(p.pow(2).sum() for p in model.parameters())


def model_in_loss(model: nn.Module) -> Any:
    net: Any = model
    return lambda out, batch: (
        _error(out, batch) + net(batch["x"] * 0.5).pow(2).mean() + net.b.weight.detach().sum()
    )


def alias_in_loss(model: nn.Module) -> Any:
    net: Any = model
    alias = net.a.weight.detach()
    return lambda out, batch: _error(out, batch) + alias.pow(2).sum()


def counting_loss(model: nn.Module) -> Any:
    calls = 0

    def loss(out: Tensor, batch: Any) -> Tensor:
        nonlocal calls
        calls += 1
        return _error(out, batch) * (2 if calls > 50 else 1)

    return loss


class CountingLoss:
    """A loss that is an object with a count."""

    def __init__(self, model: nn.Module) -> None:
        self.calls = 0

    def __call__(self, out: Tensor, batch: Any) -> Tensor:
        self.calls += 1
        return _error(out, batch) * self.calls

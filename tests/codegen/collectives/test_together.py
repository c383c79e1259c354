"""Collectives and what is beside them as operators of torch: what they compute, and that torch sees
through them."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from threading import get_ident
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import opcheck

from meshwright.codegen.collectives import together
from meshwright.codegen.collectives.comm import Comm
from meshwright.ir.kernels.route import route_home, route_out
from meshwright.testing.simulated import simulate
from meshwright.testing.spawn import run_ranks

OPERATORS = torch.ops.meshwright


def drawn(seed: int = 0) -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)


def alone() -> Comm:
    return Comm({}, {"tp": 1}, {"tp": 0})


def gathered(comm: Comm, x: Tensor, *more: Tensor, sizes: Sequence[int]) -> Tensor:
    first, second, bias = more
    made = together.gather_linear(comm, x, (first, second), (bias, None), "tp", 1, sizes)
    return made[0].sin().sum() + made[1].cos().sum()


def scattered(comm: Comm, x: Tensor, weight: Tensor, bias: Tensor, sizes: Sequence[int]) -> Tensor:
    return together.linear_scatter(comm, x, weight, bias, "tp", 1, sizes).sin().sum()


def normed(comm: Comm, x: Tensor, *more: Tensor, sizes: Sequence[int] = ()) -> Tensor:
    residual, gain, bias = more
    total, out, *_ = together.reduce_norm(comm, x, residual, gain, bias, 1e-5, "tp")
    return total.sin().sum() + out.cos().sum()


def routed(comm: Comm, x: Tensor, *more: Tensor, sizes: Sequence[int] = ()) -> Tensor:
    tokens, places = torch.arange(len(x)).repeat(3), torch.arange(3 * len(x)).view(3, -1)
    return route_home(route_out(x, tokens, places).sin(), tokens, places).cos().sum()


Call = tuple[Callable[..., Tensor], list[tuple[int, ...]]]
CALLS: dict[str, Call] = {
    "gather_linear": (gathered, [(2, 4, 5), (3, 5), (7, 5), (3,)]),
    "linear_scatter": (scattered, [(2, 4, 5), (3, 5), (3,)]),
    "reduce_norm": (normed, [(2, 4, 5), (2, 4, 5), (5,), (5,)]),
    "route": (routed, [(4, 5)]),
}


def results(run: Callable[..., Tensor], given: Sequence[Tensor], **more: Any) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in given]
    made = run(*leaves, **more)
    return [made.detach(), *torch.autograd.grad(made, leaves)]


def compiled_is_eager(comm: Comm, name: str, backend: str, sizes: Sequence[int]) -> bool:
    """As one graph, which a break would refuse."""
    torch.compiler.reset()  # what others compiled counts against a limit
    run, shapes = CALLS[name]
    draw = drawn()
    given = [draw(*shape) for shape in shapes]
    wanted = results(lambda *x: run(comm, *x, sizes=sizes), given)
    made = torch.compile(lambda *x: run(comm, *x, sizes=sizes), fullgraph=True, backend=backend)
    found = results(made, given)
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)
    return True


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", CALLS)
def test_compiled_as_one_graph(name, backend):
    assert compiled_is_eager(alone(), name, backend, (4,))


def on_ranks(backend: str) -> bool:
    group = torch.distributed.group.WORLD
    comm = Comm({"tp": group}, {"tp": 2}, {"tp": torch.distributed.get_rank()})
    sizes = {"gather_linear": (4, 4), "linear_scatter": (2, 2), "reduce_norm": ()}
    return all(compiled_is_eager(comm, name, backend, sizes[name]) for name in sizes)


def test_compiled_on_real_ranks():
    assert run_ranks(2, on_ranks, "aot_eager") == [True, True]


@pytest.mark.parametrize("name", CALLS)
def test_traced_without_memory(name):
    """Forward and backward, with the operators in the graph."""
    run, shapes = CALLS[name]
    comm = alone()
    with FakeTensorMode():
        given = [torch.empty(shape, requires_grad=True) for shape in shapes]

        def whole(*x: Tensor) -> tuple[Tensor, ...]:
            return torch.autograd.grad(run(comm, *x, sizes=(4,)), x)

        graph = make_fx(whole)(*given)
    targets = [str(node.target) for node in graph.graph.nodes]
    asked = {"route": ["route_out", "route_home"]}.get(name, [name])
    assert all(any(f"meshwright.{one}." in target for target in targets) for one in asked)
    if name == "gather_linear":
        assert targets.count("meshwright.gather_linear_backward.default") == 1


def test_opcheck():
    draw, comm = drawn(), alone()
    x, weight, bias = draw(2, 4, 5), draw(3, 5), draw(3)
    given = [value.requires_grad_() for value in (x, weight, bias)]
    where = comm.number, "tp", 1, (4,)
    opcheck(OPERATORS.gather_linear, (given[0], [given[1]], [given[2]], [True], *where))
    opcheck(OPERATORS.linear_scatter, (*given, *where))
    norm = draw(2, 4, 5), draw(2, 4, 5), draw(5), draw(5)
    residual, gain = norm[1].requires_grad_(), norm[2].requires_grad_()
    for last in (None, norm[3].requires_grad_()):
        given = (norm[0].requires_grad_(), residual, gain, last, 1e-5, comm.number, "tp")
        opcheck(OPERATORS.reduce_norm, given)


SIZES = [(3, 2, 1), (1, 0, 2), (1, 1, 1)]
"""Of the dim that ranks share: uneven, nothing on one of them, a single one."""


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("batch", "inner", "columns"), [(1, 1, 1), (2, 5, 3)])
def test_gradients_of_products_that_gather(sizes, batch, inner, columns):
    """Weights differ per rank, as those of column-parallel products do."""
    draw = drawn()
    x = draw(batch, sum(sizes), inner).requires_grad_()
    weights = [(draw(columns, inner), draw(columns + 1, inner)) for _ in sizes]
    weights = [tuple(w.requires_grad_() for w in pair) for pair in weights]
    loss = sum((x @ a.T).sin().sum() + (x @ b.T).cos().sum() for a, b in weights)
    wanted, *of_weights = torch.autograd.grad(loss, (x, *(w for pair in weights for w in pair)))

    def body(comm: Comm) -> list[Tensor]:
        rank = comm.coordinates["tp"]
        own = x.detach().split(sizes, 1)[rank], *(w.detach() for w in weights[rank])
        own = [value.clone().requires_grad_() for value in own]
        made = together.gather_linear(comm, own[0], own[1:], (None, None), "tp", 1, sizes)
        total = made[0].sin().sum() + made[1].cos().sum()
        return list(torch.autograd.grad(total, own))

    for rank, found in enumerate(simulate({"tp": 3}, body)):
        parts = wanted.split(sizes, 1)[rank], *of_weights[2 * rank : 2 * rank + 2]
        for one, other in zip(found, parts, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_weights_are_multiplied_while_the_gradient_is_on_its_way(monkeypatch):
    """Two products' gradients leave as one; each rank is a thread."""
    orders: dict[int, list[str]] = defaultdict(list)
    outer = together._outer

    def multiplied(grad: Tensor, x: Tensor) -> Tensor:
        orders[get_ident()].append("weight")
        return outer(grad, x)

    def body(comm: Comm) -> list[str]:
        line, order = comm.line("tp"), orders[get_ident()]
        begin = line.begin_reduce_scatter

        def begun(x: Tensor) -> Callable[[], Tensor]:
            order.append("begin")
            arrive = begin(x)

            def waited() -> Tensor:
                order.append("wait")
                return arrive()

            return waited

        line.begin_reduce_scatter = begun  # type: ignore[method-assign]
        draw = drawn()
        given = [value.requires_grad_() for value in (draw(2, 3, 5), draw(4, 5), draw(2, 5))]
        made = together.gather_linear(comm, given[0], given[1:], (None, None), "tp", 1, (3, 3))
        (made[0].sum() + made[1].sum()).backward()
        return order

    monkeypatch.setattr(together, "_outer", multiplied)
    for order in simulate({"tp": 2}, body):
        assert order == ["begin", "weight", "weight", "wait"]


@pytest.mark.parametrize("sizes", SIZES)
def test_gradients_of_products_that_scatter(sizes):
    draw = drawn()
    xs = [draw(2, sum(sizes), 5).requires_grad_() for _ in sizes]
    weights = [draw(4, 5).requires_grad_() for _ in sizes]
    bias = draw(4).requires_grad_()
    loss = (sum(x @ w.T for x, w in zip(xs, weights, strict=True)) + bias).sin().sum()
    wanted = torch.autograd.grad(loss, (*xs, *weights, bias))

    def body(comm: Comm) -> list[Tensor]:
        rank = comm.coordinates["tp"]
        # The bias is the first rank's summand; its gradient is that of all rows.
        own = xs[rank], weights[rank], bias * (rank == 0)
        given = [value.detach().clone().requires_grad_() for value in own]
        made = together.linear_scatter(comm, *given, "tp", 1, sizes)
        return list(torch.autograd.grad(made.sin().sum(), given))

    for rank, found in enumerate(simulate({"tp": 3}, body)):
        for one, other in zip(found, (wanted[rank], wanted[3 + rank], wanted[-1]), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)

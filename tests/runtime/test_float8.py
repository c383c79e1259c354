"""Linear layers with products of 8-bit floats: what changes, what it costs, and torchao's own."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.costmodel.ops.compute import formula
from meshwright.costmodel.ops.local_op import LocalInput, LocalOp
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.cluster.device import OpClass
from meshwright.ir.errors import PlanError
from meshwright.ir.graph.graph import Graph
from meshwright.ir.trace.trace import trace
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import make_problem
from meshwright.planner.search.notes import notes_of
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.runtime.stage.stage import StageModule
from meshwright.testing.apart_libraries import with_library
from meshwright.testing.spawn import run_ranks

RECIPES = {"fp8-rowwise": "rowwise", "fp8-tensorwise": "tensorwise"}
LR, STEPS = 1e-2, 4


def model() -> nn.Sequential:
    """The second layer has sizes that no kernel takes; the last one stays as it is."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 40), nn.GELU(), nn.Linear(40, 48),
        nn.GELU(), nn.Linear(48, 32), nn.GELU(), nn.Linear(32, 16),
    )  # fmt: skip


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(64, 32, generator=generator), torch.randn(64, 16, generator=generator)


def traced(precision: str) -> Graph:
    return trace(model(), batch(), nn.functional.mse_loss, precision=precision)


def losses_of(precision: str, ranks: int, **sizes: Any) -> list[float]:
    made = make_problem(traced(precision), Cluster.local(ranks), optimizer="sgd")
    plan = build_plan(made, uniform_choice(made, **sizes), predict=False)
    return run_ranks(ranks, _train, plan)[0]


def _train(plan: Any) -> list[float]:
    with_library("torchao")
    job = compile_job(
        model(), plan, loss_fn=nn.functional.mse_loss, graph=traced(plan.precision),
        optimizer="sgd", lr=LR, device="cpu", check=False,
    )  # fmt: skip
    losses = [float(job.step(batch())) for _ in range(STEPS)]
    job.close()
    return losses


def plain(recipe: str) -> list[float]:
    """In torch and torchao alone: bfloat16 copies, float32 is stepped."""
    with_library("torchao")
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    master, read = model(), model().bfloat16()
    config = Float8LinearConfig.from_recipe_name(recipe)
    narrow = convert_to_float8_training(
        deepcopy(read), config=config, module_filter_fn=lambda _, name: name in ("0", "6")
    )
    optimizer = torch.optim.SGD(master.parameters(), LR)
    losses, (x, y) = [], batch()
    for _ in range(STEPS):
        for wide, copy in zip(master.parameters(), narrow.parameters(), strict=True):
            copy.data.copy_(wide.detach())
            copy.grad = None
        loss = nn.functional.mse_loss(narrow(x.bfloat16()).float(), y)
        loss.backward()
        for wide, copy in zip(master.parameters(), narrow.parameters(), strict=True):
            assert copy.grad is not None
            wide.grad = copy.grad.float()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def test_which_layers_are_of_8_bit_products() -> None:
    """Those whose weight has sizes that kernels take, but the last."""
    for precision, recipe in RECIPES.items():
        layers = [op.target for op in traced(precision).ops if "linear" in op.target]
        narrow = f"meshwright.{recipe}_linear.default"
        assert layers == [narrow, *2 * ["aten.linear.default"], narrow, "aten.linear.default"]


@pytest.mark.parametrize("precision", RECIPES)
def test_one_rank_is_torchao_in_plain_torch(precision: str) -> None:
    """And not the job without 8-bit products, nor the other recipe."""
    with_library("torchao")
    found, wanted = losses_of(precision, 1), plain(RECIPES[precision])
    assert found == pytest.approx(wanted, rel=1e-6)
    other = next(name for name in RECIPES if name != precision)
    for name in ("bf16", other):
        assert found != pytest.approx(losses_of(name, 1), rel=1e-6)


@pytest.mark.parametrize("sizes", [{"dp_shard": 2, "zero": 3}, {"tp": 2}], ids=str)
def test_ranks_round_by_their_own_scales(sizes: dict[str, int]) -> None:
    """As far from one rank as 8-bit rounding, and no further."""
    with_library("torchao")
    one, two = losses_of("fp8-rowwise", 1), losses_of("fp8-rowwise", 2, **sizes)
    assert two == pytest.approx(one, rel=3e-3)


def _layer(target: str, size: int, dtype: str = "float8_e4m3fn") -> LocalOp:
    values = LocalInput((size, size), 2 * size * size, True, False)
    weight = LocalInput((size, size), 2 * size * size, True, True)
    return LocalOp(
        target, OpClass.MATMUL, dtype, 2.0 * size**3, (values, weight), ((size, size),),
        2 * size * size, True,
    )  # fmt: skip


def test_prices_have_the_casts_in_them() -> None:
    """Large products are faster than in bfloat16, small ones slower; scales by row cost more. Sizes
    that kernels do not take are products of bfloat16."""
    (device,) = Cluster.preset("h100-sxm").device_types
    by_row, by_tensor = "meshwright.rowwise_linear.default", "meshwright.tensorwise_linear.default"

    def seconds(target: str, size: int, dtype: str = "float8_e4m3fn") -> float:
        return formula(_layer(target, size, dtype), device).total_s

    def half(size: int) -> float:
        return seconds("aten.linear.default", size, "bfloat16")

    assert seconds(by_tensor, 8192) < seconds(by_row, 8192) < half(8192)
    assert seconds(by_tensor, 512) > half(512)
    assert seconds(by_row, 8200) == half(8200)


def test_devices_without_such_products_are_refused() -> None:
    graph = traced("fp8-rowwise")
    with pytest.raises(PlanError, match=r"a100-80 has no peak for float8_e4m3fn: nearest is bf16"):
        make_problem(graph, Cluster.preset("a100-80"))
    made = make_problem(graph, Cluster.preset("h100-sxm"))
    plan = build_plan(made, uniform_choice(made))
    assert any("products of 2 linear layers" in note for note in notes_of(made, plan))


def test_tf32_is_priced_by_its_own_peak() -> None:
    (device,) = Cluster.preset("a100-80").device_types
    wide, rounded = (
        formula(_layer("aten.linear.default", 4096, dtype), device).total_s
        for dtype in ("float32", "tf32")
    )
    assert rounded < 0.3 * wide
    graph = trace(model(), batch(), nn.functional.mse_loss, global_batch_size=2**16)
    steps = []
    for precision in ("fp32", "tf32"):
        made = make_problem(graph, Cluster.preset("a100-80"), precision=precision)
        plan = build_plan(made, uniform_choice(made))
        assert plan.predicted
        steps.append(plan.predicted)
    assert steps[1].step_s < steps[0].step_s and steps[1].peak_bytes == steps[0].peak_bytes


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_products_are_rounded_within_a_step_alone(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    plain = StageModule.backward

    def watched(*args: Any) -> Any:
        seen.append(torch.backends.cuda.matmul.allow_tf32)
        return plain(*args)

    monkeypatch.setattr(StageModule, "backward", watched)
    graph = trace(model(), batch(), nn.functional.mse_loss)
    made = make_problem(graph, Cluster.local(1), precision=precision)
    plan = build_plan(made, uniform_choice(made), predict=False)
    job = compile_job(
        model(), plan, loss_fn=nn.functional.mse_loss, graph=graph, device="cpu", check=False
    )
    job.step(batch())
    job.close()
    assert seen == [precision == "tf32"] and not torch.backends.cuda.matmul.allow_tf32

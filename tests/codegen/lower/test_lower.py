"""Lowered programs against the model they came from, on simulated ranks."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.codegen.collectives.comm import Comm
from meshwright.codegen.lower.lower import lower
from meshwright.codegen.lower.program import StageProgram
from meshwright.codegen.one_process import run_local
from meshwright.ir.errors import PlanError
from meshwright.ir.plan.plan import Plan
from meshwright.testing.simulated import simulate
from meshwright.testing.whole_values import held
from tests.codegen import mlp
from tests.codegen.equality import rank_of

WHOLE = mlp.stage("h.0", "head", (0,), (mlp.BATCH,), tp=1)


def wanted() -> tuple[Tensor, dict[str, Tensor]]:
    params = {name: p.requires_grad_() for name, p in mlp.parameters().items()}
    loss = mlp.reference(params, mlp.batch())
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in params.items() if p.grad is not None}


def local_params(programs: Sequence[StageProgram]) -> dict[str, Tensor]:
    whole = mlp.parameters()
    params = {p.name: p for program in programs for p in program.params}
    return {name: held(whole[name], p.runs).clone().requires_grad_() for name, p in params.items()}


def run(plan: Plan) -> tuple[Tensor, dict[str, list[tuple[Any, Tensor]]]]:
    """Summed loss and, per parameter, each tp rank's description and gradient, summed over dp."""
    stage = plan.stages[0]
    shares, count = stage.batch_shares, plan.num_microbatches

    def body(comm: Comm) -> tuple[Tensor, dict[str, Any]]:
        dp = comm.coordinates["dp"]
        programs = lower(mlp.graph(), plan, rank_of(stage, comm))
        starts = [m * sum(shares) + sum(shares[:dp]) for m in range(count)]
        batches = [{"x": mlp.batch()[start : start + shares[dp]]} for start in starts]
        params = local_params(programs)
        loss = run_local(programs, params, batches, comm, starts)
        loss.backward()
        described = {p.name: p for program in programs for p in program.params}
        grads = {}
        for name, p in params.items():
            assert p.grad is not None
            total = comm.sum_over(p.grad, "dp")
            for axis in described[name].sum_over:
                total = comm.sum_over(total, axis)
            grads[name] = (described[name], total)
        return comm.sum_over(loss.detach(), "dp"), grads

    results = simulate({"dp": stage.dp, **dict(stage.model)}, body)
    found = {n: [grads[n] for _, grads in results] for n in results[0][1]}
    return results[0][0], found


def check(plan: Plan) -> None:
    loss, grads = wanted()
    found_loss, found = run(plan)
    torch.testing.assert_close(found_loss, loss, rtol=1e-12, atol=1e-12)
    assert set(found) == set(grads)
    for name, ranks in found.items():
        for param, grad in ranks:
            expected = held(grads[name], param.runs)
            torch.testing.assert_close(grad, expected, rtol=1e-11, atol=1e-12, msg=name)


def test_one_process_is_the_model_to_the_bit() -> None:
    loss, grads = wanted()
    found_loss, found = run(mlp.plan(WHOLE))
    assert torch.equal(found_loss, loss)
    assert all(torch.equal(found[name][0][1], grads[name]) for name in grads)


@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize(("shares", "count"), [((8,), 1), ((2,), 4), ((3, 1), 2), ((2, 1, 1), 2)])
def test_any_mesh_is_the_model(tp: int, shares: tuple[int, ...], count: int) -> None:
    devices = tuple(range(tp * len(shares)))
    check(mlp.plan(mlp.stage("h.0", "head", devices, shares, tp), num_microbatches=count))


def test_stages_hand_over_what_the_next_needs() -> None:
    first = mlp.stage("h.0", "h.0", (0,), (8,), 1)
    second = mlp.stage("h.1", "head", (0,), (8,), 1)
    programs = lower(mlp.graph(), mlp.plan(first, second), 0)
    assert (
        [v.name for v in programs[0].sends] == [v.name for v in programs[1].receives] == ["down0"]
    )
    assert programs[0].loss == "" and programs[1].loss == "loss"
    assert programs[0].inputs == ("x",) and programs[1].inputs == ()
    params = mlp.parameters()
    loss = run_local(programs, params, [{"x": mlp.batch()}])
    assert torch.equal(loss, mlp.reference(params, mlp.batch()))


def test_equal_blocks_share_code_and_values_are_dropped() -> None:
    (program,) = lower(mlp.graph(), mlp.plan(WHOLE), 0)
    assert [call.block for call in program.calls] == ["h.0", "h.1", "h.2", "head"]
    assert program.calls[1].code is program.calls[2].code
    assert program.calls[0].code is not program.calls[1].code, "its input has no gradient"
    assert [call.drop for call in program.calls] == [("x",), ("down0",), ("down1",), ("down2",)]


def test_the_bias_of_a_row_split_layer_is_replicated_with_whole_gradients() -> None:
    stage = mlp.stage("h.0", "head", (0, 1), (8,), 2)
    (program,) = lower(mlp.graph(), mlp.plan(stage), 1)
    bias = next(p for p in program.params if p.fqn == "h.0.down.bias")
    assert (bias.split_on, bias.sum_over, bias.local_shape) == ((), (), (mlp.WIDTH,))


def test_what_needs_the_whole_batch_is_refused_with_microbatches() -> None:
    stage = mlp.stage("h.0", "head", (0,), (2,), 1)
    plan = mlp.plan(stage, num_microbatches=4)
    layout = plan.layouts[0].ops | {"act/relu": {"dp": "R -> R"}}
    changed = [mlp.BlockLayout(**{**_fields(plan.layouts[0]), "ops": layout}), plan.layouts[1]]
    with pytest.raises(PlanError, match="needs the whole batch at once"):
        lower(mlp.graph(), Plan(**{**_fields(plan), "layouts": tuple(changed)}), 0)


def _fields(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__dataclass_fields__}

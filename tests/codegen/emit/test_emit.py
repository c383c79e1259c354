"""The written source: how it reads, and that it computes what the module computes."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.codegen.collectives.comm import Comm
from meshwright.codegen.emit.emit import write_sources
from meshwright.codegen.lower.lower import lower
from meshwright.testing.simulated import simulate
from meshwright.testing.whole_values import held
from tests.codegen import mlp

PLAN = mlp.plan(mlp.stage("h.0", "head", (0, 1), (8,), 2, recompute="full"))

GOLDEN = '''\
def h_1(comm, up_weight, up_bias, down_weight, down_bias, down0):
    """h.*"""
    # h.* input down0 over tp: forward identity; backward all_reduce 384 B
    down0_copy = comm.identity(down0, "tp", backward="all_reduce")
    up1 = aten.linear.default(down0_copy, up_weight, up_bias)
    act1 = aten.relu.default(up1)
    # h.*.down.bias over tp: forward mask; backward identity
    down_bias_summand = comm.mask(down_bias, "tp", backward="identity")
    down1 = aten.linear.default(act1, down_weight, down_bias_summand)
    # h.*.down/linear over tp: forward all_reduce 384 B; backward identity
    down1_whole = comm.all_reduce(down1, "tp", backward="identity")
    return (down1_whole,)
'''


def test_a_block_reads_well() -> None:
    source = lower(mlp.graph(), PLAN, 1)[0].source
    assert GOLDEN in source
    assert 'comm.block = "h.2"  # recomputed' in source
    assert max(map(len, source.splitlines())) <= 100


def test_the_source_runs_as_the_modules_do(tmp_path: Path) -> None:
    def body(comm: Comm) -> tuple[Tensor, Tensor]:
        (program,) = lower(mlp.graph(), PLAN, comm.coordinates["tp"])
        (path,) = write_sources([program], tmp_path / str(comm.coordinates["tp"]))
        whole = mlp.parameters()
        tensors = {p.name: held(whole[p.name], p.runs) for p in program.params}
        written: dict[str, Any] = {}
        exec(compile(path.read_text(), str(path), "exec"), written)
        loss = written["forward"](comm, {**tensors, "x": mlp.batch()})["loss"]
        values = {"x": mlp.batch()}
        for call in program.calls:
            given = [tensors[n] for n in call.params] + [values[n] for n in call.inputs]
            values |= dict(zip(call.outputs, call.run(comm, *given), strict=True))
        return loss, values["loss"]

    for written, run in simulate({"dp": 1, "tp": 2}, body):
        assert torch.equal(written, run)
    torch.testing.assert_close(written, mlp.reference(mlp.parameters(), mlp.batch()))

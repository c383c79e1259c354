"""Models in `torch.channels_last`: jobs keep the layout, whatever brings the images to a block."""

from dataclasses import replace
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshwright.codegen.collectives.comm import Comm
from meshwright.codegen.emit.emit import write_sources
from meshwright.codegen.lower.lower import lower
from meshwright.codegen.passes import compiled
from meshwright.costmodel.fit.fit_compute import record_work
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.cluster.device import OpClass
from meshwright.ir.graph.graph import Graph
from meshwright.ir.graph.images import channels_last, is_channels_last
from meshwright.ir.plan.plan import Plan, model_mesh
from meshwright.ir.trace.trace import trace
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import make_problem
from meshwright.profiling.ops import op_tasks
from meshwright.profiling.work import block_tasks
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.runtime.job.weights import model_tensors
from meshwright.runtime.messages.mailbox import Mailbox
from meshwright.runtime.profiling.bench import bench
from meshwright.runtime.profiling.ops import measure_op
from meshwright.testing.equality import check_equal
from meshwright.testing.models import Batch, ModelCase
from meshwright.testing.spawn import alone, run_ranks
from meshwright.testing.split_all import split_all
from tests.layouts import Layouts

BATCH, STEPS = 12, 3
CPU = torch.device("cpu")


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1)
        self.bn = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(F.relu(self.bn(self.conv1(x))))


class Classifier(nn.Module):
    """Its head looks at positions with their channels: a view of images in this layout only."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.layers = nn.Sequential(*(Residual(8) for _ in range(layers)))
        self.head = nn.Linear(8, 5)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.layers(self.stem(x)), 2)
        positions = x.permute(0, 2, 3, 1).view(x.shape[0], -1, x.shape[1])
        return self.head(positions).mean(1)


def _batch(size: int, generator: torch.Generator) -> Batch:
    images = torch.randn(size, 3, 12, 12, generator=generator)
    return images, torch.randint(5, (size,), generator=generator)


CASE = ModelCase("classifier", Classifier, _batch, F.cross_entropy)


@cache
def traced() -> Graph:
    return trace(CASE.model(), CASE.example(BATCH), F.cross_entropy)


PLANS: dict[str, dict[str, Any]] = {
    "alone": {},
    "replicas": {"dp_replicate": 2, "num_microbatches": 2},
    "pipeline": {"pp": 2, "cuts": (2,), "num_microbatches": 3, "recompute": "full"},
    "tensor": {"tp": 2},
    "zero3": {"dp_shard": 3, "zero": 3},
    "uneven": {"pp": 2, "stage_dp": (2, 1), "num_microbatches": 3, "schedule": "zero_bubble"},
}


def plan_of(name: str) -> Plan:
    asked = PLANS[name]
    world = sum(asked.get("stage_dp", ())) or prod(
        n for axis, n in asked.items() if axis in ("pp", "tp", "dp_replicate", "dp_shard")
    )
    problem = make_problem(traced(), Cluster.local(world), precision="fp64", optimizer="adam")
    if tp := asked.get("tp"):
        problem.solved[model_mesh({"tp": tp}), ""] = split_all(traced(), tp)
    plan = build_plan(problem, uniform_choice(problem, **asked), predict=False)
    assert plan.world_size == world
    return plan


def test_tensor_parallelism_splits_convolutions() -> None:
    (program, *_) = lower(traced(), plan_of("tensor"), 0)
    shapes = {param.fqn: (param.local_shape, param.global_shape) for param in program.params}
    assert any(mine != whole for fqn, (mine, whole) in shapes.items() if "conv" in fqn)


@pytest.mark.sampled
@pytest.mark.parametrize("name", PLANS)
def test_a_job_equals_one_process(name: str) -> None:
    found = check_equal(CASE, plan_of(name), traced(), steps=STEPS)
    assert found.worst_of_both <= 1e-9, str(found)


def test_compiled_blocks_equal_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of torch.compile but its last step, which takes long."""
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    plan = plan_of("tensor")
    plan = replace(plan, stages=tuple(replace(stage, compile=True) for stage in plan.stages))
    found = check_equal(CASE, plan, traced(), steps=STEPS)
    assert found.worst_of_both <= 1e-9, str(found)


def test_written_source_keeps_the_layout(tmp_path: Path) -> None:
    plan, model = plan_of("alone"), CASE.model()
    (program,) = lower(traced(), plan, 0)
    (path,) = write_sources([program], tmp_path)
    written: dict[str, Any] = {}
    exec(compile(path.read_text(), str(path), "exec"), written)
    images, labels = CASE.example(BATCH)
    tensors = {p.name: model_tensors(model)[p.fqn].contiguous() for p in program.params}
    given = dict(zip(traced().inputs, (images, labels), strict=True))
    given["loss_count"] = torch.tensor(float(BATCH))
    with Layouts() as layouts:
        (loss,) = written["forward"](Comm({}, {}, {}), {**tensors, **given}).values()
    assert layouts.seen == [(True, True)] * 7
    torch.testing.assert_close(loss, F.cross_entropy(model(images), labels))


class Mixed(Classifier):
    """The last layer alone is as PyTorch makes it, and gets such images."""

    def __init__(self) -> None:
        super().__init__(4)
        self.layers[-1].to(memory_format=torch.contiguous_format)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[:-1](self.stem(x)).contiguous()
        return self.head(self.layers[-1](x).mean((2, 3)))


def test_layers_of_another_layout_are_other_blocks() -> None:
    case = replace(CASE, name="mixed", build=Mixed)
    graph = trace(case.model(), case.example(BATCH), F.cross_entropy)
    found = {}
    for block in graph.blocks:
        last = {
            graph.tensors[op.outputs[0]].channels_last
            for op in graph.block_ops(block)
            if op.target.startswith("aten.conv")
        }
        found[block.name] = (block.pattern, last)
    assert found["layers.0"] == found["layers.1"] == ("layers.*", {True})
    assert found["layers.3"] == ("layers.3", {False})


def _received(plan: Plan, batch: Batch) -> list[bool]:
    """Of values and gradients, before anything is done with them."""
    found = []
    receive = Mailbox.receive

    def noted(self: Mailbox, *args: Any) -> Tensor | None:
        x = receive(self, *args)
        found.append(x is None or is_channels_last(x))
        return x

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Mailbox, "receive", noted)
        _layouts(plan, batch)
    return found


@pytest.mark.parametrize("name", ["pipeline", "uneven"])
def test_messages_are_not_turned(name: str) -> None:
    plan = plan_of(name)
    found = run_ranks(plan.world_size, _received, plan, CASE.example(BATCH))
    assert all(rank and all(rank) for rank in found)


def _layouts(plan: Plan, batch: Batch) -> list[tuple[bool, bool]]:
    job = compile_job(
        CASE.model(), plan, optimizer="adam", loss_fn=F.cross_entropy, device="cpu", graph=traced()
    )
    with Layouts() as layouts:
        job.step(batch)
    job.close()
    return layouts.seen


@pytest.mark.sampled
@pytest.mark.parametrize("name", PLANS)
def test_convolutions_run_in_the_models_layout(name: str) -> None:
    plan = plan_of(name)
    found = run_ranks(plan.world_size, _layouts, plan, CASE.example(BATCH))
    assert all(found)
    assert all(layout == (True, True) for seen in found for layout in seen), found


def test_the_trace_follows_weights_or_images() -> None:
    """On the meta device too, also where that is the default while tracing."""
    images, labels = CASE.example(BATCH)
    plain = CASE.model().to(memory_format=torch.contiguous_format)
    with torch.device("meta"):
        empty = Classifier().double()
    for model, x, given in (
        (CASE.model(), images, False),
        (plain, channels_last(images), True),
        (empty, torch.zeros_like(images, device="meta"), False),
    ):
        with torch.device(x.device):
            graph = trace(model, (x, labels), F.cross_entropy)
        made = [op for op in graph.ops if op.target.startswith("aten.conv")]
        assert len(made) == 7 and all(graph.tensors[op.outputs[0]].channels_last for op in made)
        assert graph.tensors[graph.inputs[0]].channels_last is given
        assert graph.fingerprint == traced().fingerprint


def test_blocks_and_ops_are_measured_in_the_layout() -> None:
    found = alone(_measured)
    names = {target.split(".")[1] for target, last in found.items() if last}
    assert names == {"conv2d", "batch_norm", "relu", "add", "max_pool2d"}
    assert found["aten.linear.default"] is False


def _measured() -> dict[str, bool]:
    """By op whether a record is of images that lie so; checks blocks on the way."""
    problem = make_problem(traced(), Cluster.local(1), precision="fp64")
    for task in block_tasks(problem):
        layer = bench(traced(), task, CPU).layer()
        names = [name for name in layer.values if traced().tensors[name].channels_last]
        assert names or task.pattern == "stem"
        assert all(is_channels_last(layer.values[name]) for name in names)
        with Layouts() as layouts:
            made = layer.forward()
        assert layouts.seen == [(True, True)] * len(layouts.seen)
        assert all(is_channels_last(made[n]) == is_channels_last(g)
                   for n, g in layer.gradients.items())  # fmt: skip
    tasks = [task for task in op_tasks(problem) if task.op_class != OpClass.COPY]
    found = {}
    for task in tasks:
        with Layouts() as layouts:
            record = measure_op(task, CPU, budget_s=0.0)
        assert {image for image, _ in layouts.seen} <= {task.operands[0].channels_last}
        assert not (record.channels_last and record_work(record, "cpu").turned_bytes)
        found[record.target] = record.channels_last
    assert {t.operands[0].channels_last for t in tasks if "conv2d" in t.target} == {True, False}
    return found

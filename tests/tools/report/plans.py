"""Plans to report on: a small one with names that mean harm, and one of many ranks and blocks."""

from dataclasses import replace

from meshwright.ir.plan.detail import (
    BlockName,
    Detail,
    DeviceRun,
    Moving,
    ParameterShape,
    RankDetail,
    StageDetail,
    StageTraffic,
)
from meshwright.ir.plan.plan import (
    BlockLayout,
    ClusterId,
    InputSpec,
    ModelId,
    Plan,
    ScheduleTable,
    Stage,
)
from meshwright.ir.plan.predicted import (
    Alternative,
    Evidence,
    Improvement,
    Prediction,
    RankMemory,
    StagePrediction,
)
from meshwright.planner.schedules.one_f_one_b import schedule

GIB = 2**30
EVIL = "</script><script>document.title = 'owned'</script><img src=x onerror=alert(1)>"
EVIDENCE = Evidence(
    searcher="ilp", seed=0, candidates=900, infeasible=20, exhausted=False, bound_s=1.0, gap=0.25,
    pruned={"bound": 12},
    improved=(Improvement(candidates=1, name="dp 4", step_s=2.0),
              Improvement(candidates=90, name="pp 2", step_s=1.25, bound_s=1.0)),
    alternatives=(Alternative(name="dp 4", step_s=1.5, peak_bytes=30 * GIB, why="20.0% slower"),),
)  # fmt: skip


def piped(
    num_stages: int, per_stage: int, num_blocks: int, num_microbatches: int, name: str = "h"
) -> Plan:
    """A pipeline of unequal stages of `per_stage` devices, `num_blocks` blocks of two kinds."""
    blocks = tuple(
        BlockName(name=f"{name}.{i}", pattern=f"{name}.*" if i % 7 else f"{name}.*#2")
        for i in range(num_blocks)
    )
    per = num_blocks // num_stages
    patterns = sorted({block.pattern for block in blocks})
    stages = tuple(
        _stage(s, blocks[s * per].name, blocks[(s + 1) * per - 1].name, per_stage, patterns)
        for s in range(num_stages)
    )
    rows = tuple(str(schedule(num_stages, num_microbatches, num_stages)).splitlines())
    predicted = _prediction(stages, blocks, patterns, num_microbatches)
    return Plan(
        model=ModelId(name=name, fingerprint="abc", num_parameters=7 * 10**9,
                      num_blocks=num_blocks,
                      inputs=(InputSpec(name="x", shape=(1, 8), dtype="float32"),)),
        cluster=ClusterId(name=f"gpu:{name}", fingerprint="def",
                          num_devices=num_stages * per_stage),
        global_batch_size=num_microbatches * per_stage, num_microbatches=num_microbatches,
        optimizer="adamw", precision="bf16-autocast", stages=stages,
        schedule=ScheduleTable(name="one_f_one_b", rows=rows),
        layouts=tuple(_layout(pattern) for pattern in patterns), predicted=predicted,
        evidence=EVIDENCE, notes=(f"a note on {name}",), hash="0" * 64,
    )  # fmt: skip


def _stage(index: int, first: str, last: str, size: int, patterns: list[str]) -> Stage:
    return Stage(
        first=first, last=last, mesh={"dp_replicate": size},
        devices=tuple(range(index * size, (index + 1) * size)), batch_shares=(1,) * size,
        layouts={pattern: f"{pattern} whole" for pattern in patterns},
        recompute={patterns[0]: "full"} if index % 3 == 0 else {},
    )  # fmt: skip


def _layout(pattern: str) -> BlockLayout:
    return BlockLayout(
        name=f"{pattern} whole", pattern=pattern, mesh={}, inputs=(), outputs=(),
        parameters={"mlp.up.weight": {"tp": "S(0)"}, "mlp.down.weight": {"tp": "S(1)"}},
        ops={"mlp.up/linear": {"dp": "S(0) R|P -> S(0)"}},
    )  # fmt: skip


def _forward_s(stage: int) -> float:
    return 0.01 + 0.0001 * (stage % 17)


def _prediction(
    stages: tuple[Stage, ...], blocks: tuple[BlockName, ...], patterns: list[str], count: int
) -> Prediction:
    many = len(stages)
    step_s = (count + many - 1) * 0.035
    devices = many * len(stages[0].devices)
    detail = Detail(
        blocks=blocks,
        parameters={p: {
            "mlp.up.weight": ParameterShape(shape=(512, 128), dtype="float32", nbytes=262144),
            "mlp.down.weight": ParameterShape(shape=(128, 512), dtype="float32", nbytes=262144),
            "norm.weight": ParameterShape(shape=(128,), dtype="float32", nbytes=512),
        } for p in patterns},
        devices=(DeviceRun(first=0, count=devices, device="gpu", node_devices=8,
                           memory_bytes=80 * GIB, room_bytes=78 * GIB),),
        kinds=tuple(_detail(s, many) for s in range(many)), stages=tuple(range(many)),
        ranks=tuple(_rank(s, step_s, count) for s in range(many)), links={"nvlink": 2e11},
    )  # fmt: skip
    return Prediction(
        step_s=step_s, samples_per_s=100.0, error_band=0.2, source="fitted", detail=detail,
        stages=tuple(
            StagePrediction(forward_s=_forward_s(s), backward_s=2 * _forward_s(s), send_s=1e-4,
                            sync_s=1e-3, optimizer_s=1e-3, memory=_memory(s, many))
            for s in range(many)
        ),
    )  # fmt: skip


def _memory(stage: int, many: int) -> RankMemory:
    return RankMemory(
        parameters_bytes=4 * GIB, gradients_bytes=4 * GIB, optimizer_bytes=8 * GIB,
        activations_bytes=(many - stage) * 50 * GIB // many, communication_bytes=GIB // 10,
        workspace_bytes=GIB // 2,
    )  # fmt: skip


def _detail(stage: int, many: int) -> StageDetail:
    rise = Moving(workspace=GIB // 2)
    return StageDetail(
        actions={"F": _forward_s(stage), "B": 2 * _forward_s(stage),
                 "B last": 2 * _forward_s(stage)},
        saved_bytes=50 * GIB // many, halved_bytes=0, always=Moving(communication=GIB // 10),
        begun=Moving(gradients=4 * GIB),
        rises={name: rise for name in ("F", "I", "B", "B first", "B last", "B first last")},
        traffic=(StageTraffic(purpose="gradients", axis="dp", link="nvlink", nbytes=4 * GIB,
                         seconds=0.02),),
    )  # fmt: skip


def _rank(stage: int, step_s: float, count: int) -> RankDetail:
    forward_s = count * _forward_s(stage)
    return RankDetail(
        starts_s=0.0, gradients_s=0.001, optimizer_s=0.001, publish_s=0.0,
        seconds={"forward": forward_s, "backward": 2 * forward_s, "optimizer": 0.001,
                 "gradients": 0.001, "wait": step_s - 3 * forward_s - 0.002},
    )  # fmt: skip


def evil() -> Plan:
    """Every name of it tries to break out of the page."""
    return piped(2, 2, 8, 4, name=EVIL)


def many_ranks() -> Plan:
    """1,000 ranks in 200 stages, 400 blocks."""
    made = piped(200, 5, 400, 8, name="encoder.layers")
    return replace(made, model=replace(made.model, name="DeepNet"))

"""Reads a published table and normalises its rows; what cannot be used is kept with its reason."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

from benchmarks.published.measured import RowError, fits_of, memory_of, part_of, step_of
from benchmarks.published.model_kinds import Adapter
from benchmarks.published.parts import REPORT, part_of_run
from benchmarks.published.shapes import Shape, read_shape
from meshwright.ir.errors import PlanError

TABLES = Path(__file__).resolve().parents[1] / "tables"
_BROKEN_GB_S = 100.0
"""A node whose collectives are slower than this in the job's own test has a device that does not
work as it should."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """How a run divides its work."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    """Ranks that share each expert."""
    vpp: int = 1
    zero: int = 0
    shard: int = 1
    """Ranks that share the optimizer state, or the parameters under FSDP."""
    sp: bool | None = None
    """None: what the stack does by default."""
    async_tp: bool = False
    schedule: str = ""
    ends_are_layers: bool = False
    """Stages are cut as if embedding and head were a layer each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One run."""

    table: str
    index: int
    system: str
    framework: str
    gpu: str
    gpus: int
    gpus_per_node: int
    network: str
    bandwidths: Mapping[str, float]
    """GB/s measured at the start of the job, by collective."""
    shape: Shape
    parallel: Parallel
    gbs: int
    mbs: int
    seq: int
    precision: str
    recompute: str
    compiled: bool
    revised: bool
    """Run with the newer of two versions of the stack that a table mixes: pipelines and reruns."""
    lbs: int = 0
    """Samples of a replica after which its pipeline is empty; 0: all of a step."""
    graphs: str = ""
    """What of a layer is in CUDA graphs, where experts are not."""
    beside: bool = False
    """Tokens travel beside the work of another micro-batch."""
    padded: bool = False
    """Experts have as many tokens as their capacity: others are dropped, or zeros added."""
    adapter: Adapter | None = None
    """None: all of the model is trained."""
    early: bool = False
    """A pipeline of nanotron before its fix: 4 to 50 times too slow, as sends and receives wait."""
    step_s: float | None
    """Measured; None where the table has none or says that it is not to be trusted."""
    untimed: str = ""
    """Why a run that took place has no time to compare."""
    peak_bytes: float | None
    memory_kind: str
    fits: bool | None
    label: str
    part: str = REPORT
    """By `parts.py`."""

    @property
    def microbatches(self) -> int:
        return max(1, ceil(self.gbs / (self.mbs * self.parallel.dp)))


@dataclass(frozen=True, slots=True)
class Skip:
    """A row that is not used, and why."""

    index: int
    reason: str


@dataclass(frozen=True, slots=True)
class Table:
    """What one file holds."""

    name: str
    rows: tuple[Row, ...]
    skipped: tuple[Skip, ...]


def read_table(path: Path) -> Table:
    """The usable rows of a file, and the others with their reasons."""
    data = json.loads(path.read_text())
    if not isinstance(data, dict) or not isinstance(data.get("rows"), list):
        raise PlanError(f"{path.name} has no list `rows`; it is not a published table")
    name = path.stem
    rerun = any("after_pp_fix" in raw for raw in data["rows"])
    context = Context(
        name, data.get("common") or {}, _text_of(data), rerun, path.parent.resolve() == TABLES
    )
    rows, skipped = [], []
    for index, raw in enumerate(data["rows"]):
        try:
            rows.append(read_row(raw, index, context))
        except RowError as error:
            skipped.append(Skip(index, str(error)))
    return Table(name, tuple(rows), tuple(skipped))


@dataclass(frozen=True, slots=True)
class Context:
    """What a table says of all its rows."""

    name: str
    common: Mapping[str, Any]
    text: str
    rerun: bool = False
    """Some rows were run again after a fix."""
    is_ours: bool = False
    """In the repository's folder: only such tables have a calibration part."""


def _text_of(data: Mapping[str, Any]) -> str:
    parts = [data.get("name"), data.get("description"), data.get("common"), data.get("sources")]
    return json.dumps(parts)


def read_row(raw: Mapping[str, Any], index: int, context: Context) -> Row:
    """One row; RowError says what it lacks."""
    if raw.get("status") == "failed":
        raise RowError("the run failed for another reason than memory")
    if raw.get("calibrates"):
        raise RowError(f"it sets {raw['calibrates']}")
    common = context.common
    hardware, batch = part_of(raw, "hardware"), part_of(raw, "batch")
    gpus = _count(hardware, "gpus") or _count(hardware, "nodes") * 8
    if not gpus:
        raise RowError("hardware.gpus is missing")
    shape = read_shape(part_of(raw, "model"), common, RowError)
    parallel = _parallel(part_of(raw, "parallel"), raw, gpus)
    gbs, mbs = _batch(batch, part_of(raw, "parallel"), parallel)
    seq = _count(batch, "seq") or _count(common, "seq")
    if not seq:
        raise RowError("batch.seq is missing")
    fits = fits_of(raw)
    # Of jobs that ran out of memory no table says: they count as of the stack as it became.
    early = parallel.pp > 1 and not raw.get("after_pp_fix") and fits is not False
    early &= "nanotron" in context.name
    step_s = None if fits is False else step_of(raw, shape, gbs, seq, gpus)
    untimed = _untimed(raw, step_s, early, fits)
    peak, kind = memory_of(part_of(raw, "measured"), str(common.get("framework") or ""))
    return Row(
        table=context.name,
        index=index,
        system=_system(raw, context),
        framework=str(common.get("framework") or ""),
        gpu=str(hardware.get("gpu") or common.get("gpu") or ""),
        gpus=gpus,
        gpus_per_node=_count(hardware, "gpus_per_node") or _count(common, "gpus_per_node") or 8,
        network=" ".join(
            str(source[key])
            for source in (hardware, common)
            for key in ("instance", "network", "cluster")
            if key in source
        ),
        bandwidths=part_of(raw, "network_gb_s"),
        shape=shape,
        parallel=parallel,
        gbs=gbs,
        mbs=mbs,
        lbs=_count(batch, "lbs"),
        graphs=str(raw.get("graphs") or ""),
        beside=bool(raw.get("moe_a2a_overlap")),
        padded=bool(raw.get("padded")),
        adapter=_adapter(part_of(raw, "adapter")),
        seq=seq,
        precision=str(raw.get("precision") or common.get("precision") or "bf16"),
        recompute=str(raw.get("recompute") or common.get("recompute") or "none"),
        compiled=bool(raw.get("compile")),
        revised=context.rerun and (parallel.pp > 1 or bool(raw.get("after_pp_fix"))),
        early=early,
        step_s=None if untimed else step_s,
        untimed=untimed,
        peak_bytes=peak,
        memory_kind=kind,
        fits=fits,
        label=_label(raw, shape, parallel, mbs),
        part=part_of_run(raw) if context.is_ours else REPORT,
    )


def _untimed(raw: Mapping[str, Any], step_s: float | None, early: bool, fits: bool | None) -> str:
    if fits is False:
        return ""
    if early:
        return "a pipeline before its stack's fix"
    if step_s is None:
        return "the table has none or does not trust it"
    if (part_of(raw, "network_gb_s").get("ar_intra") or _BROKEN_GB_S) < _BROKEN_GB_S:
        return "the job's own test found a device ten times slower than usual"
    return ""


def _count(part: Mapping[str, Any], key: str) -> int:
    value = part.get(key) or 0
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
        raise RowError(f"{key} is {value!r}; it must be a whole number")
    if value < 0:
        raise RowError(f"{key} is {value}; it must be positive")
    return int(value)


def _adapter(part: Mapping[str, Any]) -> Adapter | None:
    if not part:
        return None
    rank, targets = _count(part, "rank"), part.get("targets")
    if not rank or not targets:
        raise RowError("adapter.rank or adapter.targets is missing")
    return Adapter(rank=rank, only=tuple(targets), dropout=float(part.get("dropout") or 0.0))


def _parallel(part: Mapping[str, Any], raw: Mapping[str, Any], gpus: int) -> Parallel:
    if gpus > 1 and "strategy" in part:
        raise RowError(f"the strategy {part['strategy']!r} does not say how work is divided")
    part = {**_from_plan(part, gpus), **part} if gpus > 1 else {"tp": 1, "pp": 1, "dp": 1, **part}
    if not part:
        raise RowError("the parallel layout is not given")
    tp, pp, cp = (_count(part, key) or 1 for key in ("tp", "pp", "cp"))
    dp = _count(part, "dp") or gpus // (tp * pp * cp)
    if tp * pp * cp * dp != gpus:
        raise RowError(f"tp {tp} x pp {pp} x cp {cp} x dp {dp} is not {gpus} GPUs")
    schedule = str(part.get("schedule") or "")
    # torchtitan gives looped schedules two stages per rank unless told otherwise.
    looped = 2 if schedule.lower().startswith("interleaved") else 1
    zero = _count(part, "zero")
    shard = _count(part, "fsdp_group") or _count(part, "zero1_group") or dp * cp
    return Parallel(
        tp=tp, pp=pp, dp=dp, cp=cp, ep=_count(part, "ep") or 1,
        etp=_count(part, "etp") or 1, vpp=_count(part, "vpp") or looped,
        zero=zero, shard=shard if zero else 1, sp=part.get("sp"),
        async_tp=bool(part.get("async_tp") or part.get("tp_async_comm")),
        schedule=schedule, ends_are_layers=bool(part.get("ends_are_layers")),
    )  # fmt: skip


_PLAN = re.compile(
    r"(\d+) stages?(?: x | on )(\d+) GPUs?|(\d+) stages, each (\d+)-way data parallel"
)


def _from_plan(part: Mapping[str, Any], gpus: int) -> dict[str, Any]:
    """The layout that Alpa's words or logical mesh (data parallel x tensor parallel) describe."""
    if mesh := part.get("logical_mesh"):
        return {"dp": mesh[0], "tp": mesh[1]}
    plan = part.get("plan")
    if not plan:
        return {}
    match = _PLAN.search(str(plan))
    if not match:
        raise RowError(f"the plan {plan!r} is not of equal stages")
    stages, size = int(match[1] or match[3]), int(match[2] or match[4])
    inner = re.search(r"dp (\d+) x tp (\d+)|mesh \((\d+),(\d+)\)", str(plan))
    dp, tp = (int(g) for g in inner.groups() if g) if inner else (size, 1)
    micro = re.search(r"(\d+) micro-batches", str(plan))
    # Alpa's suites ask for reduce-scatters (prefer_reduce_scatter), which divide the optimizer too.
    found = {"pp": stages, "dp": dp, "tp": tp, "zero": 2 if dp > 1 else 0}
    return {**found, "ga": int(micro[1])} if micro else found


def _batch(
    batch: Mapping[str, Any], part: Mapping[str, Any], parallel: Parallel
) -> tuple[int, int]:
    """Sequences per step and per micro-batch of one replica."""
    part = {**_from_plan(part, 0), **part}
    gbs, mbs, steps = _count(batch, "gbs"), _count(batch, "mbs"), _count(part, "ga")
    if (total := _count(batch, "mbs_total")) and not mbs:
        mbs = max(1, total // parallel.dp)
    if (local := _count(batch, "local_batch")) and not mbs:
        # torchtitan's default then: as many micro-batches as stages.
        mbs = max(1, local // (parallel.pp * parallel.vpp))
    if not mbs and gbs and steps:
        mbs = max(1, gbs // (parallel.dp * steps))
    if not gbs and mbs and steps:
        gbs = mbs * parallel.dp * steps
    if not mbs or not gbs:
        raise RowError("the micro-batch or the global batch size is not given")
    return gbs, mbs


def _system(raw: Mapping[str, Any], context: Context) -> str:
    named = [raw.get(key) for key in ("framework", "method", "system", "study")]
    return " ".join([*(str(n) for n in named if n), context.name, context.text])


def _label(raw: Mapping[str, Any], shape: Shape, parallel: Parallel, mbs: int) -> str:
    name = str(part_of(raw, "model").get("name") or f"{shape.parameters / 1e9:.1f}B")
    axes = [f"{k}{getattr(parallel, k)}" for k in ("dp", "tp", "pp", "cp", "vpp")
            if getattr(parallel, k) > 1]  # fmt: skip
    method = raw.get("method") or raw.get("precision") or ""
    return " ".join([name, *axes, f"zero{parallel.zero}", f"mbs{mbs}", str(method)])


def tables(*folders: Path, only: str = "") -> Iterator[Table]:
    """The tables of some folders, in the order of their names."""
    paths = sorted((p for folder in folders for p in folder.glob("*.json")), key=lambda p: p.stem)
    if only:
        paths = [path for path in paths if path.stem == only]
    if not paths:
        wanted, where = f"{only}.json" if only else "*.json", ", ".join(map(str, folders))
        raise PlanError(f"{where} has no {wanted}; give the folder of the published tables")
    yield from map(read_table, paths)

"""Data parallel training throughput that NVIDIA published, against traced models and presets.

python -m benchmarks.published.ddp TABLE.json [-o FILE.md]

TABLE.json: `nvidia_dle_data_parallel`, transcribed from the READMEs of NVIDIA/DeepLearningExamples.
Unlike `benchmarks.published`, everything goes the way of a user's model: trace, plan, estimate.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import cache
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from torch.nn import functional

from benchmarks.printed import print_page
from benchmarks.published.models import (
    SSD300,
    Pretraining,
    ResNet,
    Summariser,
    box_loss,
    token_loss,
)
from meshwright.costmodel.comm.comm import sped
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.cluster.device import DeviceType, OpClass
from meshwright.ir.errors import PlanError
from meshwright.ir.graph.graph import Graph
from meshwright.ir.trace.trace import trace
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import make_problem

PRESETS = {
    "A100-SXM4-80GB": "a100-80",
    "A100-SXM4-40GB": "a100-40",
    "V100-SXM2-16GB": "v100-16",
    "V100-SXM2-32GB": "v100-32",
}
TF32_FLOPS = 156e12
"""A100 data sheet: what float32 matrix products run in under NVIDIA's containers."""
LENGTH = {128: 128, 512: 288}
"""Tokens a sequence is computed with, by what the rows name. The recipe's loader (LDDL,
scripts/run_pretraining.sh: phase2_bin_size 64) pads to the longest of a bin of 64 in the second
phase, and Wikipedia's sequences of up to 512 have 256 tokens on average (Krell et al. 2021,
packing factor 2.0): half a bin more. The first phase is not binned."""
PREDICTIONS = {128: 20, 512: 43}
"""Masked tokens per sequence for which BERT's head runs: 20 of 128, and 15 % (its scripts)."""
SEQUENCES = {128: 65536, 512: 32768}
"""Sequences per update, which give the accumulation where a row's is misprinted."""
CONV_BATCH = {
    "ResNet-50": {"fp32": {"a100": 256, "v100": 112}, "bf16": {"a100": 256, "v100": 256}},
    "ResNeXt-101": {"fp32": {"a100": 128, "v100": 64}, "bf16": {"a100": 128, "v100": 128}},
}
"""Per GPU, by its configs.yml, as the rows have none."""
CONVOLUTIONAL = ("ResNet-50", "ResNeXt-101", "SSD300")
MODELS = ("BERT-Large", *CONVOLUTIONAL, "BART")
_WHOLE = 2**40
NOTES = """\
Found with these rows in view (BERT at length 512 was 58 % off, its mixed precision 13 %, ResNet-50
on V100 up to 55 %), from sources that are not these rows:

- Sequences of the second phase are padded to a bin of 64, not to 512: the recipe's scripts, and the
  mean length of Wikipedia's (Krell et al. 2021). 288 tokens instead of 512.
- Mixed precision is `model.half()`: nothing is cast, and norms and softmax run in half precision.
- Products of A100 are slower in whole runs than alone (1.08, in its preset).
- BERT's gradients are reduced in one bucket, which nothing hides (run_pretraining.py).
- Starting and ending a product takes as long at any rate, and so stands for fewer steps of its
  inner loop without tensor cores; cuDNN's Winograd convolutions multiply 2.25 times less there, as
  PipeDream's profiles of ResNet-50 and VGG-16 on V100 have it. Products with very long inner loops
  (gradients of convolutions' weights) are split further. These are in the product.

ResNeXt-101 (32 groups) was added later. At first float32 and TF32 were 12 to 15 % and mixed
precision 28 to 46 % too slow: each group of 4 to 32 channels was priced as a product of its own,
whose tile is nearly empty. Kernels put several into a tile, or use no tensor cores; so does the
product now.

SSD300 and BART came last, at a first look -11 to -24 % and -6 to +9 %. All mixed precision of
convolutions was 4 to 24 % too slow then (median 15.6 %). Since then presets of P100, V100 and T4
are fitted to DeepBench's single kernels, and bringing images into the layout of tensor cores has a
price where they come as NCHW (from timm's timings on RTX 3090): docs/results/devices.md and
published_timm.md. No number is from these rows. SSD's heads have a bias, for which its 3 x 3
convolutions had been taken for others; that was seen here.

Batch-norm is synchronised over replicas here.

Left out: fine-tuning of BERT and of BART's second set (no sequence length in the rows).
Transformer-XL was tried: float32 on
V100 comes out 16 % too slow to 18 % too fast, TF32 on A100 21 to 46 % and mixed precision 20 to
150 % too fast. Its steps wait for the CPU, which launches each operator of LAMB for each parameter
and waits for the device where the adaptive softmax looks up which token is in which band."""


@dataclass(frozen=True, slots=True)
class Case:
    """One published number."""

    model: str
    sequence: int
    preset: str
    nodes: int
    gpus: int
    micro_batch: int
    accumulation: int
    precision: str
    """Ours: bf16 for any mixed one, fp32 for TF32 too."""
    measured: float
    """Samples per second."""

    @property
    def all_half(self) -> bool:
        """BERT's mixed precision keeps nothing in float32 but the optimizer's copy (`model.half()`
        in run_pretraining.py), which no precision of ours does: it is a float32 run on a machine
        whose every byte counts for two."""
        return self.model == "BERT-Large" and self.precision == "bf16"

    @property
    def channels_last(self) -> bool:
        """Classifiers in mixed precision (ConvNets' configs.yml: memory_format), SSD always (its
        main.py's default, which its scripts and its benchmark's command leave)."""
        return self.precision == "bf16" or self.model == "SSD300"

    @property
    def batch(self) -> int:
        return self.micro_batch * self.accumulation * self.gpus


@cache
def graph_of(model: str, sequence: int, batch: int, channels_last: bool) -> Graph:
    """The model's step at a global batch size."""
    layout = torch.channels_last if channels_last else torch.contiguous_format
    with torch.device("meta"):
        if model == "SSD300":
            boxes = torch.zeros(batch, 5, 8732, dtype=torch.long)
            made = SSD300().to(memory_format=layout)
            return trace(made, (torch.zeros(batch, 3, 300, 300), boxes), box_loss)
        if model == "BART":
            ids = torch.zeros(batch, sequence, dtype=torch.long)
            return trace(Summariser(), (ids, ids), token_loss)
        if model in CONV_BATCH:
            images = torch.zeros(batch, 3, 224, 224)
            labels = torch.zeros(batch, dtype=torch.long)
            made = ResNet((3, 4, 23, 3), 2, 32) if model == "ResNeXt-101" else ResNet((3, 4, 6, 3))
            made = made.to(memory_format=layout)
            return trace(made, (images, labels), functional.cross_entropy)
        ids = torch.zeros(batch, LENGTH[sequence], dtype=torch.long)
        labels = torch.zeros(batch, PREDICTIONS[sequence], dtype=torch.long)
        return trace(Pretraining(PREDICTIONS[sequence]), (ids, labels), token_loss)


def cases(rows: list[Mapping[str, Any]]) -> Iterator[Case]:
    """The numbers of the table that we have a model for."""
    for row in rows:
        name, variant = row["model"]["name"], row["model"].get("variant", "")
        known = name.startswith(CONVOLUTIONAL) or "Pre-training" in variant
        if not known and not (name == "BART" and "seq" in row["batch"]):
            continue
        for place, precision in enumerate(("fp32", "bf16")):
            key = ("throughput_fp32_or_tf32", "throughput_mixed")[place]
            if key in row["measured"]:
                yield _case(row, place, precision, float(row["measured"][key]))


def _case(row: Mapping[str, Any], place: int, precision: str, measured: float) -> Case:
    hardware, batch = row["hardware"], row["batch"]
    preset, gpus = PRESETS[hardware["gpu"]], hardware["gpus"]
    for name, batches in CONV_BATCH.items():
        if row["model"]["name"].startswith(name):
            micro = batches[precision][preset.split("-")[0]]
            return Case(name, 0, preset, 1, gpus, micro, 1, precision, measured)
    micro = int(re.findall(r"\d+", batch.get("per_gpu", "0"))[0])
    if row["model"]["name"].startswith("SSD300"):
        return Case("SSD300", 0, preset, 1, gpus, micro, 1, precision, measured)
    sequence = batch["seq"]
    if row["model"]["name"] == "BART":
        return Case("BART", sequence, preset, 1, gpus, micro, 1, precision, measured)
    accumulation = int(re.findall(r"\d+", batch["accumulation"])[place])
    micro = int(re.findall(r"\d+", batch["per_gpu"])[place])
    if micro >= 2048:  # V100 rows count all accumulated sequences
        micro //= accumulation
    elif hardware["nodes"] > 1 or "Multi-node" in row["model"]["variant"]:
        micro = 128 if micro == 126 else micro  # misprint: 126 does not divide the update
        accumulation = SEQUENCES[sequence] // (micro * gpus)
    return Case(
        "BERT-Large", sequence, preset, hardware["nodes"], gpus, micro, accumulation, precision,
        measured,
    )  # fmt: skip


def cluster_of(case: Case) -> Cluster:
    """The preset, with the tensor cores that the run used."""
    found = Cluster.preset(
        case.preset, num_nodes=case.nodes, devices_per_node=case.gpus // case.nodes
    )
    devices = tuple(_as_used(device, case) for device in found.device_types)
    if not case.all_half:
        return replace(found, device_types=devices)
    nodes = tuple(replace(node, link=sped(node.link, 2.0)) for node in found.nodes)
    return replace(
        found, device_types=devices, nodes=nodes,
        between_nodes=found.between_nodes and sped(found.between_nodes, 2.0),
    )  # fmt: skip


def _as_used(device: DeviceType, case: Case) -> DeviceType:
    peaks, curves = dict(device.peak_flops), dict(device.curves)
    bandwidth = device.memory_bandwidth_bytes_per_s
    if case.all_half:
        peaks["float32"] = peaks["float16"]
        bandwidth *= 2
    elif case.precision == "bf16":
        peaks["bfloat16"] = peaks["float16"]  # a V100 ran float16
    elif case.preset.startswith("a100") and case.model not in CONVOLUTIONAL:
        peaks["float32"] = TF32_FLOPS  # cuDNN's convolutions use it by themselves
    if peaks["float32"] != device.peak_flops["float32"]:
        curves[OpClass.MATMUL] = replace(curves[OpClass.MATMUL], wide_share=None)
    return replace(device, peak_flops=peaks, curves=curves, memory_bandwidth_bytes_per_s=bandwidth)


def predicted(case: Case) -> float:
    """Samples per second of plain data parallelism with accumulation."""
    graph = graph_of(case.model, case.sequence, case.batch, case.channels_last)
    autocasts = case.precision == "bf16" and not case.all_half
    precision = "bf16-autocast" if autocasts else "fp32"
    problem = make_problem(graph, cluster_of(case), precision=precision)
    if case.model == "BERT-Large":
        # Its DDP has one bucket (bucket_cap_mb is the device's memory): nothing hides it.
        problem.tables.bucket_bytes = _WHOLE
    choice = uniform_choice(problem, dp_replicate=case.gpus, num_microbatches=case.accumulation)
    plan = build_plan(problem, choice)
    assert plan.predicted
    return plan.predicted.samples_per_s


def read(path: Path) -> list[Mapping[str, Any]]:
    if not path.exists():
        raise PlanError(f"{path} is missing: it must be the table nvidia_dle_data_parallel.json")
    found: list[Mapping[str, Any]] = json.loads(path.read_text())["rows"]
    return found


def report(path: Path) -> str:
    rows: list[str] = []
    off: dict[str, list[float]] = {name: [] for name in MODELS}
    for case in cases(read(path)):
        error = predicted(case) / case.measured - 1
        off[case.model].append(abs(error))
        name = f"{case.model}{f' seq {case.sequence}' if case.sequence else ''}"
        rows.append(
            f"| {name} | {case.nodes}x{case.gpus // case.nodes} {case.preset} | {case.precision} | "
            f"{case.micro_batch} x {case.accumulation} | {case.measured:.0f} | "
            f"{case.measured * (1 + error):.0f} | {error:+.1%} |"
        )
    return "\n".join([
        "# Published data parallel throughput",
        "",
        f"{date.today()}, `python -m benchmarks.published.ddp TABLE.json`. NVIDIA",
        "DeepLearningExamples; samples per second. fp32 is TF32 on A100; bf16 stands for any mixed",
        "precision. Nothing is fitted to these rows.",
        "",
        "The route is a user's: trace, plan, `plan.predicted`, with the plan given. Devices are",
        "not the bare presets: the stacks' precision and links are put in, and BERT's gradients",
        "are one bucket, as in its code.",
        "",
        f"All: {summary([e for some in off.values() for e in some])}.",
        *(f"{name}: {summary(some)}." for name, some in off.items()),
        "",
        NOTES,
        "",
        "| model | cluster | precision | per GPU | measured | predicted | error |",
        "|---|---|---|---|---|---|---|",
        *rows,
        "",
    ])  # fmt: skip


def summary(errors: Sequence[float], what: str = "numbers") -> str:
    """Of relative errors without their signs."""
    p90 = quantiles(errors, n=10, method="inclusive")[-1]
    return (
        f"{len(errors)} {what}, median error {median(errors):.1%}, 90th percentile {p90:.1%}, "
        f"worst {max(errors):.1%}"
    )


def main() -> None:
    print_page(__doc__, report, "table")


if __name__ == "__main__":
    main()

"""The models of ddl-benchmarks as gradients: sizes, and when the backward makes them.

Traced at full size without weights; relative times of the ops by our formulas for an RTX 2080 Ti in
float32, scaled so that a step of one GPU takes what was measured.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch.nn import functional
from transformers import BertConfig, BertForPreTraining

from benchmarks.dear.schedules import Gradient
from meshwright.costmodel.block.price_ops import GraphFacts, StageSite, Walk
from meshwright.costmodel.memory.memory import optimizer_traffic
from meshwright.ir import presets
from meshwright.ir.cluster.device import DeviceType
from meshwright.ir.graph.graph import Graph, Kind
from meshwright.ir.layout.layout import Axis
from meshwright.ir.precision import precision
from meshwright.ir.trace.trace import trace
from meshwright.testing.networks import ResNet50

BERT_TOKENS = 64
"""Per sample, in the benchmark's script."""


@dataclass(frozen=True, slots=True)
class Model:
    """A model of the benchmark and its speed on one GPU."""

    name: str
    batch: int
    one_gpu: float
    """Measured samples per second."""
    graph: Callable[[int], Graph]
    optimizer: str

    @property
    def one_gpu_s(self) -> float:
        return self.batch / self.one_gpu


@dataclass(frozen=True, slots=True)
class Timed:
    """A model's step on one GPU."""

    forward_s: float
    gradients: tuple[Gradient, ...]
    """In the order of the backward."""
    optimizer_s: float

    @property
    def nbytes(self) -> float:
        return sum(gradient.nbytes for gradient in self.gradients)


def _resnet50(batch: int) -> Graph:
    with torch.device("meta"):
        model = ResNet50(width=64, classes=1000)
        images, labels = torch.zeros(batch, 3, 224, 224), torch.zeros(batch, dtype=torch.long)

    return trace(model, (images, labels), functional.cross_entropy)


def _bert(**sizes: int) -> Callable[[int], Graph]:
    def traced(batch: int) -> Graph:
        with torch.device("meta"):
            model = BertForPreTraining(
                BertConfig.from_dict({**sizes, "attn_implementation": "eager"})
            )
            ids = torch.zeros(batch, BERT_TOKENS, dtype=torch.long)
            following = torch.zeros(batch, dtype=torch.long)
        return trace(model, {"input_ids": ids, "labels": ids, "next_sentence_label": following})

    return traced


LARGE = dict(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)
MODELS = (
    Model("ResNet-50", 64, 253.1, _resnet50, "sgd_momentum"),
    Model("BERT-Base", 64, 212.8, _bert(), "sgd_momentum"),
    Model("BERT-Large", 8, 49.0, _bert(**LARGE), "sgd_momentum"),
)


def device() -> DeviceType:
    """RTX 2080 Ti by its data sheet; shares of the peaks as for the other GPUs."""
    return replace(
        presets.device("v100-16"), name="rtx2080ti", memory_bandwidth_bytes_per_s=616e9,
        peak_flops={"float32": 13.45e12, "float16": 26.9e12, "bfloat16": 13.45e12},
        processors=68, source="datasheet", reference="NVIDIA Turing whitepaper",
    )  # fmt: skip


@cache
def timed(model: Model) -> Timed:
    """The model's step on one GPU, scaled to the measured speed."""
    graph = model.graph(model.batch)
    gpu = device()
    ops = op_seconds(graph, gpu)
    trained = sum(p.nbytes for p in graph.parameters)
    rate = gpu.memory_bandwidth_bytes_per_s * 0.8  # as large copies reach on other GPUs
    update_s = optimizer_traffic(trained, model.optimizer) / rate
    scale = (model.one_gpu_s - update_s) / sum(f + b for f, b in ops)
    ops = [(f * scale, b * scale) for f, b in ops]
    return Timed(sum(f for f, _ in ops), gradients_of(graph, ops), update_s)


def op_seconds(graph: Graph, gpu: DeviceType) -> list[tuple[float, float]]:
    """(forward, backward) of each op on one device with the whole batch."""
    site = StageSite(
        axes={"dp": Axis(1, (graph.batch_size,), graph.batch_size), "tp": Axis(1)},
        coordinates={"dp": 0, "tp": 0},
        device=gpu,
        levels={"dp": (), "tp": ()},
    )
    walk = Walk(GraphFacts.of(graph, precision("fp32"), "cpu"), site, None)
    found, before = [], (0.0, 0.0)
    for op in graph.ops:
        walk.op(op, {})
        after = (
            walk.clock.forward_s,
            walk.clock.backward_input_s + walk.clock.backward_weight_s,
        )
        found.append((after[0] - before[0], after[1] - before[1]))
        before = after
    return found


def gradients_of(graph: Graph, ops: list[tuple[float, float]]) -> tuple[Gradient, ...]:
    """Each parameter where its first op stands, as the backward of that one is the last."""
    seen: set[str] = set()
    made: list[list[str]] = []
    for op in graph.ops:
        new = [
            n
            for n in dict.fromkeys(op.inputs)
            if graph.tensors[n].kind is Kind.PARAMETER and n not in seen
        ]
        seen.update(new)
        made.append(new)
    found: list[Gradient] = []
    backward_s = forward_s = 0.0
    for names, (forward, backward) in zip(reversed(made), reversed(ops), strict=True):
        backward_s += backward
        forward_s += forward
        for name in names:
            found.append(Gradient(backward_s, graph.tensors[name].nbytes, forward_s))
            backward_s = forward_s = 0.0
    # What is before the first parameter: its backward comes after the last gradient.
    last = found[-1]
    found[-1] = replace(last, backward_s=last.backward_s + backward_s,
                        forward_s=last.forward_s + forward_s)  # fmt: skip
    return tuple(found)

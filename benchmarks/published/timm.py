"""Image classifiers on one RTX 3090 as timm timed them, against traced models and the preset.

python -m benchmarks.published.timm [-o FILE.md]

tables/timm.csv has the rows and their source. Everything goes the way of a user's model: trace,
plan, estimate.
"""

import csv
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from functools import cache, partial
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from transformers import (
    ConvNextConfig,
    ConvNextForImageClassification,
    MobileNetV2Config,
    MobileNetV2ForImageClassification,
    SwinConfig,
    SwinForImageClassification,
    ViTConfig,
    ViTForImageClassification,
)

from benchmarks.printed import print_page
from benchmarks.published.ddp import summary
from benchmarks.published.models import VGG, Logits, ResNet
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.graph.graph import Graph
from meshwright.ir.trace.trace import trace
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import make_problem

LAST = torch.channels_last
TABLE = Path(__file__).parents[1] / "tables" / "timm.csv"
NOTES = """\
NHWC: the model was brought to channels_last. Where it is NCHW, tensor cores' kernels turn images
and results around (`OpCurve.turning`); by how much longer than copying that takes (1.2) is from the
differences between both layouts of ResNet-18, 50 and 101, ResNeXt-101, VGG-19 and MobileNetV2 here.
No other number is from these rows. At a first look at nine models, with convolutions taken for
seven tenths of a product and without layouts, the convolutional ones were 24 to 33 % too slow in
NHWC and within 11 % in NCHW, which PyTorch has by default, ViT 9 to 12 % too slow, ConvNeXt 11 %
too fast. Convolutions are fitted to DeepBench's since then. All 29 models with that: median 10.5 %,
worst but one 18 %, ViT 9 to 18 % too slow. That led to what fits of five older GPUs have in
common: starting a product takes 7 to 11 us on each (docs/results/devices.md), where GPUs without
timings of their own had borrowed A100's number of steps.

VGG-13 in NCHW stands apart in the table: it takes 2.5 times as long per image as VGG-11, VGG-16
with as many images as fit takes 1.8 times. What is left: convolutions of each channel by itself
(ConvNeXt, MobileNet) are too fast, and so is Swin, whose windows' copies this PyTorch made one by
one. Memory was not measured."""


@dataclass(frozen=True, slots=True)
class Case:
    """One row."""

    model: str
    layout: str
    batch: int
    parameters_m: float
    measured_s: float


def _vit(hidden: int, layers: int, patch: int = 16) -> nn.Module:
    settings = {"hidden_size": hidden, "num_hidden_layers": layers, "patch_size": patch,
                "num_attention_heads": hidden // 64, "intermediate_size": 4 * hidden,
                "num_labels": 1000, "hidden_dropout_prob": 0.0,
                "attention_probs_dropout_prob": 0.0, "attn_implementation": "eager"}  # fmt: skip
    return Logits(ViTForImageClassification(ViTConfig.from_dict(settings)))


def _convnext(width: int, depth: int) -> nn.Module:
    settings = {"depths": [3, 3, depth, 3], "hidden_sizes": [width * 2**i for i in range(4)],
                "num_labels": 1000}  # fmt: skip
    return Logits(ConvNextForImageClassification(ConvNextConfig.from_dict(settings)))


def _swin(width: int, depth: int) -> nn.Module:
    settings = {"embed_dim": width, "depths": [2, 2, depth, 2], "num_labels": 1000,
                "num_heads": [width // 32 * 2**i for i in range(4)], "drop_path_rate": 0.0,
                "hidden_dropout_prob": 0.0}  # fmt: skip
    return Logits(SwinForImageClassification(SwinConfig.from_dict(settings)))


def _mobilenet(multiplier: float) -> nn.Module:
    settings = {"num_labels": 1000, "tf_padding": False, "depth_multiplier": multiplier,
                "classifier_dropout_prob": 0.0, "finegrained_output": True}  # fmt: skip
    return Logits(MobileNetV2ForImageClassification(MobileNetV2Config.from_dict(settings)))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "resnet18": partial(ResNet, (2, 2, 2, 2), 0),
    "resnet34": partial(ResNet, (3, 4, 6, 3), 0),
    "resnet50": partial(ResNet, (3, 4, 6, 3)),
    "resnet101": partial(ResNet, (3, 4, 23, 3)),
    "resnet152": partial(ResNet, (3, 8, 36, 3)),
    "resnext50_32x4d": partial(ResNet, (3, 4, 6, 3), 2, 32),
    "resnext101_32x4d": partial(ResNet, (3, 4, 23, 3), 2, 32),
    "wide_resnet50_2": partial(ResNet, (3, 4, 6, 3), 2),
    "wide_resnet101_2": partial(ResNet, (3, 4, 23, 3), 2),
    "vgg11": partial(VGG, (1, 1, 2, 2, 2)),
    "vgg13": partial(VGG, (2, 2, 2, 2, 2)),
    "vgg16": partial(VGG, (2, 2, 3, 3, 3)),
    "vgg19": partial(VGG, (2, 2, 4, 4, 4)),
    "vit_tiny_patch16_224": partial(_vit, 192, 12),
    "vit_small_patch16_224": partial(_vit, 384, 12),
    "vit_base_patch16_224": partial(_vit, 768, 12),
    "vit_base_patch32_224": partial(_vit, 768, 12, 32),
    "vit_large_patch16_224": partial(_vit, 1024, 24),
    "vit_large_patch32_224": partial(_vit, 1024, 24, 32),
    "convnext_tiny": partial(_convnext, 96, 9),
    "convnext_small": partial(_convnext, 96, 27),
    "convnext_base": partial(_convnext, 128, 27),
    "convnext_large": partial(_convnext, 192, 27),
    "mobilenetv2_100": partial(_mobilenet, 1.0),
    "mobilenetv2_140": partial(_mobilenet, 1.4),
    "swin_tiny_patch4_window7_224": partial(_swin, 96, 6),
    "swin_small_patch4_window7_224": partial(_swin, 96, 18),
    "swin_base_patch4_window7_224": partial(_swin, 128, 18),
    "swin_large_patch4_window7_224": partial(_swin, 192, 18),
}


def cases() -> Iterator[Case]:
    with TABLE.open() as file:
        for row in csv.DictReader(line for line in file if not line.startswith("#")):
            yield Case(
                row["model"], row["layout"], int(row["batch"]), float(row["parameters_m"]),
                float(row["step_ms"]) / 1e3,
            )  # fmt: skip


@cache
def graph_of(model: str, layout: str, batch: int) -> Graph:
    with torch.device("meta"):
        images, labels = torch.zeros(batch, 3, 224, 224), torch.zeros(batch, dtype=torch.long)
        made = MODELS[model]()
        if layout == "nhwc":
            images, made = images.to(memory_format=LAST), made.to(memory_format=LAST)
        return trace(made, (images, labels), functional.cross_entropy)


def predicted(case: Case) -> float:
    """Seconds of a step in mixed precision with SGD."""
    graph = graph_of(case.model, case.layout, case.batch)
    cluster = Cluster.preset("rtx3090", num_nodes=1, devices_per_node=1)
    problem = make_problem(graph, cluster, precision="bf16-autocast", optimizer="sgd")
    plan = build_plan(problem, uniform_choice(problem, num_microbatches=1))
    assert plan.predicted
    return plan.predicted.step_s


def report() -> str:
    lines = []
    off: dict[str, list[float]] = {"NCHW": [], "NHWC": []}
    for case in cases():
        seconds = predicted(case)
        error = seconds / case.measured_s - 1
        off[case.layout.upper()].append(abs(error))
        lines.append(
            f"| {case.model} | {case.layout.upper()} | {case.batch} | "
            f"{1e3 * case.measured_s:.0f} | {1e3 * seconds:.0f} | {error:+.1%} |"
        )
    return "\n".join([
        "# timm's image classifiers on RTX 3090, predicted",
        "",
        f"{date.today()}, `python -m benchmarks.published.timm`.",
        "The route is a user's: trace, plan, `plan.predicted`, from the preset `rtx3090` as it is.",
        "",
        f"All: {_summed([e for some in off.values() for e in some])}",
        *(f"{name}: {_summed(some)}" for name, some in off.items()),
        "",
        NOTES,
        "",
        "| model | layout | batch | measured ms | predicted ms | error |",
        "|---|---|---|---|---|---|",
        *lines,
        "",
    ])  # fmt: skip


def _summed(errors: Sequence[float]) -> str:
    within = sum(e <= 0.25 for e in errors) / len(errors)
    return f"{summary(errors, 'step times')}, within 25 % {within:.0%}."


def main() -> None:
    print_page(__doc__, report)


if __name__ == "__main__":
    main()

"""NVIDIA's data parallel runs: which numbers are predicted, as what, and some of them."""

import pytest
import torch

from benchmarks.published.ddp import MODELS, Case, cases, cluster_of, graph_of, predicted
from benchmarks.published.models import SSD300, ResNet


def raw(name, gpus=1, gpu="A100-SXM4-80GB", batch=None, variant="", **measured):
    model = {"name": name, "variant": variant} if variant else {"name": name}
    return {"hardware": {"gpu": gpu, "gpus": gpus, "nodes": 1}, "model": model,
            "parallel": {"dp": gpus}, "batch": batch or {}, "measured": measured}  # fmt: skip


def test_numbers_that_say_what_was_run():
    both = {"throughput_fp32_or_tf32": 10.0, "throughput_mixed": 20.0}
    rows = [
        raw("ResNet-50 v1.5", 8, "V100-SXM2-16GB", **both),
        raw("ResNeXt-101 32x4d", **both),
        raw("SSD300 (ResNet-50)", batch={"per_gpu": "64"}, **both),
        raw("BART", batch={"per_gpu": "100, 200", "seq": 128}, throughput_fp32_or_tf32=200.0),
        raw("BART", batch={"per_gpu": "24, 40"}, throughput_fp32_or_tf32=48.0),
        raw("BERT-Large", batch={"seq": 128, "accumulation": "64 / 32", "per_gpu": "128 / 256"},
            variant="Pre-training phase 1", **both),
        raw("BERT-Large", variant="Fine-tuning SQuAD", **both),
        raw("Transformer-XL", **both),
    ]  # fmt: skip
    found = list(cases(rows))
    assert {c.model for c in found} == set(MODELS)
    assert [(c.model, c.precision, c.micro_batch, c.accumulation) for c in found] == [
        ("ResNet-50", "fp32", 112, 1), ("ResNet-50", "bf16", 256, 1),
        ("ResNeXt-101", "fp32", 128, 1), ("ResNeXt-101", "bf16", 128, 1),
        ("SSD300", "fp32", 64, 1), ("SSD300", "bf16", 64, 1), ("BART", "fp32", 100, 1),
        ("BERT-Large", "fp32", 128, 64), ("BERT-Large", "bf16", 256, 32),
    ]  # fmt: skip


def case(model, precision="bf16", preset="a100-80", batch=64, sequence=0):
    return Case(model, sequence, preset, 1, 1, batch, 1, precision, 1.0)


def test_layout_and_formats_are_those_of_the_scripts():
    def machine(one):
        return cluster_of(one).device(0)

    last = {
        (m, p): case(m, p).channels_last for m in ("ResNet-50", "SSD300") for p in ("fp32", "bf16")
    }
    assert [key for key, value in last.items() if not value] == [("ResNet-50", "fp32")]
    for layout in (True, False):
        made = graph_of("ResNet-50", 0, 8, layout)
        images = [made.tensors[op.outputs[0]] for op in made.ops if "conv2d" in op.target]
        assert len(images) == 53 and {image.channels_last for image in images} == {layout}
    half, full = machine(case("BERT-Large", sequence=128)), machine(case("ResNet-50"))
    assert half.memory_bandwidth_bytes_per_s == 2 * full.memory_bandwidth_bytes_per_s
    assert machine(case("BART", "fp32", sequence=128)).peak("float32") == 156e12
    assert machine(case("ResNet-50", "fp32")).peak("float32") == full.peak("float32")


def test_ssd_has_as_many_boxes_as_its_paper():
    with torch.device("meta"):
        model = SSD300()
        assert model(torch.zeros(2, 3, 300, 300)).shape == (2, 4 + 81, 8732)
    graph = graph_of("SSD300", 0, 8, True)
    assert any(op.target.startswith("aten.smooth_l1_loss") for op in graph.ops)


@pytest.mark.parametrize(
    ("one", "samples_per_s"),
    [(case("ResNet-50", batch=256), 2470), (case("ResNet-50", preset="v100-32", batch=256), 1156),
     (case("SSD300", preset="v100-16"), 322.8), (case("SSD300", "fp32"), 364.3),
     (case("ResNeXt-101", batch=128), 1211)],
)  # fmt: skip
def test_single_gpus(one, samples_per_s):
    """The numbers are the table's."""
    assert predicted(one) == pytest.approx(samples_per_s, rel=0.1)


def test_resnets_have_their_parameters():
    made = {(3, 4, 6, 3): (1, 1, 25.557e6), (3, 4, 23, 3): (2, 32, 44.178e6)}
    for depths, (widening, groups, count) in made.items():
        with torch.device("meta"):
            model = ResNet(depths, widening, groups)
        assert sum(p.numel() for p in model.parameters()) == pytest.approx(count, rel=1e-4)

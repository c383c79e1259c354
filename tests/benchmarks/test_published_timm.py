"""timm's classifiers: the models are those of the table, and a few are predicted."""

import pytest
import torch

from benchmarks.published.timm import MODELS, cases, graph_of, predicted

CASES = list(cases())


def test_every_row_has_its_model():
    assert {c.model for c in CASES} == set(MODELS)
    assert len(CASES) == 2 * len(MODELS)
    parameters = {c.model: c.parameters_m for c in CASES}
    for name, make in MODELS.items():
        with torch.device("meta"):
            count = sum(p.numel() for p in make().parameters())
        assert count / 1e6 == pytest.approx(parameters[name], rel=2e-3), name


@pytest.mark.sampled
@pytest.mark.parametrize(
    "model", ["resnet18", "resnext50_32x4d", "vgg16", "vit_small_patch16_224", "mobilenetv2_100"]
)
def test_step_times(model):
    found = {c.layout: (predicted(c), c.measured_s) for c in CASES if c.model == model}
    for seconds, measured_s in found.values():
        assert seconds == pytest.approx(measured_s, rel=0.2)
    if not model.startswith("vit"):
        assert found["nchw"][0] > 1.1 * found["nhwc"][0]


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_layouts(layout):
    """ConvNeXt's normalisations leave images with their channels innermost, whatever comes in."""
    assert convolved(graph_of("resnet18", layout, 4)) == {layout == "nhwc"}
    assert True in convolved(graph_of("convnext_tiny", layout, 4))


def convolved(graph):
    """Whether results of convolutions have their channels innermost."""
    made = (op.outputs[0] for op in graph.ops if "conv2d" in op.target)
    return {graph.tensors[name].channels_last for name in made}

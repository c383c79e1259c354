"""timm's classifiers: the models are those of the table, and a few are predicted."""

import pytest
import torch

from benchmarks.published_timm import MODELS, cases, cluster_of, predicted
from meshwright.ir.device import OpClass

CASES = list(cases())


def test_every_row_has_its_model():
    assert {c.model for c in CASES} == set(MODELS)
    assert len(CASES) == 2 * len(MODELS)
    parameters = {c.model: c.parameters_m for c in CASES}
    for name, make in MODELS.items():
        with torch.device("meta"):
            count = sum(p.numel() for p in make().parameters())
        assert count / 1e6 == pytest.approx(parameters[name], rel=2e-3), name


@pytest.mark.parametrize(
    "model", ["resnet18", "resnext50_32x4d", "vgg16", "vit_small_patch16_224", "mobilenetv2_100"]
)
def test_step_times(model):
    found = {c.layout: (predicted(c), c.measured_s) for c in CASES if c.model == model}
    for seconds, measured_s in found.values():
        assert seconds == pytest.approx(measured_s, rel=0.2)
    if not model.startswith("vit"):
        assert found["nchw"][0] > 1.1 * found["nhwc"][0]


def test_channels_last_are_not_turned():
    turning = {
        layout: cluster_of(layout).device(0).curves[OpClass.CONVOLUTION].turning
        for layout in ("nchw", "nhwc")
    }
    assert turning["nhwc"] == 0.0 < turning["nchw"]

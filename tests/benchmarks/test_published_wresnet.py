"""Alpa's Wide-ResNet: the model, which rows are predicted, and how."""

import pytest
import torch

from benchmarks.published.wresnet import Case, WideResNet, cases, cluster_of, predicted
from meshwright.ir.cluster.device import OpClass
from meshwright.ir.presets import DEVICES


@pytest.mark.parametrize(("channels", "billions"), [(160, 0.254123), (448, 1.965011)])
def test_its_parameters_are_those_of_the_table(channels, billions):
    with torch.device("meta"):
        model = WideResNet(channels, 2)
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, rel=1e-5)


def raw(gpus, method, layout, batch, **measured):
    return {
        "hardware": {"gpus": gpus}, "method": method, "parallel": layout, "batch": batch,
        "model": {"base_channels": 160, "width_factor": 2}, "measured": measured,
    }  # fmt: skip


def test_rows_are_predicted_whose_layout_is_known():
    one = {"gbs": 32, "mbs_total": 32}
    rows = [
        raw(4, "zero_2", {"dp": 2, "tp": 2, "zero": 2}, one, step_time_s=1.0),
        raw(4, "data_parallel", {"dp": 4, "zero": 0}, one, fits=False),
        raw(2, "alpa.intra_only", {"pp": 1}, {"gbs": 1536}, step_time_s=42.0),
        raw(2, "alpa.auto", {}, {"gbs": 1536}, tflops_per_gpu=8.0),
        raw(16, "alpa.intra_only", {"pp": 1}, {"gbs": 1536}, step_time_s=77.0),
        raw(2, "heuristic", {"strategy": "shard largest dimension"}, one, step_time_s=1.5),
        {**raw(1, "zero_2", {"dp": 1, "zero": 2}, one), "model": {"name": "GPT", "hidden": 1024}},
    ]
    assert list(cases(rows)) == [
        Case(160, 2, "zero_2", 2, 2, 2, 32, 1, 1.0),
        Case(160, 2, "data_parallel", 4, 1, 0, 32, 1, None),
        Case(160, 2, "alpa.intra_only", 2, 1, 2, 1536, 32, 42.0),
    ]


def test_only_the_convolutions_differ_from_the_preset():
    (device,) = cluster_of(2).device_types
    preset = DEVICES["v100-16"]
    changed = {kind for kind in preset.curves if device.curves[kind] != preset.curves[kind]}
    assert changed == {OpClass.CONVOLUTION}
    found = [machine.curves[OpClass.CONVOLUTION].winograd for machine in (device, preset)]
    assert found == [1.0, 2.25]


@pytest.mark.parametrize(
    ("dp", "tp", "zero", "channels", "seconds"),
    [(1, 1, 0, 160, 0.92688), (2, 1, 3, 224, 1.02019), (2, 4, 2, 448, 1.11353)],
)
def test_a_gpu_a_divided_model_and_channels_in_parts(dp, tp, zero, channels, seconds):
    case = Case(channels, 2, "auto_sharding", dp, tp, zero, 32, 1, seconds)
    assert predicted(case)[0] == pytest.approx(seconds, rel=0.1)

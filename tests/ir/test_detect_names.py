"""Names that CUDA reports and the presets they mean."""

import pytest

from meshwright.ir import presets
from meshwright.ir.cluster import detect


@pytest.mark.parametrize(
    ("name", "gib", "preset"),
    [
        ("Tesla V100-SXM2-16GB", 16, "v100-16"),
        ("Tesla V100-SXM2-32GB", 32, "v100-32"),
        ("NVIDIA A100-SXM4-40GB", 40, "a100-40"),
        ("NVIDIA A100-SXM4-80GB", 80, "a100-80"),
        ("NVIDIA A10", 24, "a10"),
        ("NVIDIA H100 80GB HBM3", 80, "h100-sxm"),
        ("NVIDIA H100", 95, "h100-hbm2e"),
        ("NVIDIA H100 PCIe", 80, "h100-pcie"),
        ("NVIDIA L40S", 45, "l40s"),
        ("NVIDIA L4", 24, "l4"),
        ("Tesla T4", 16, "t4"),
        ("NVIDIA GeForce RTX 4090", 24, "rtx4090"),
        ("NVIDIA GeForce RTX 2080", 8, "rtx2080"),
        ("NVIDIA GeForce RTX 2080 Ti", 11, "nvidia-geforce-rtx-2080-ti"),
        ("NVIDIA GeForce RTX 3090 Ti", 24, "nvidia-geforce-rtx-3090-ti"),
        ("NVIDIA T400 4GB", 4, "nvidia-t400-4gb"),
    ],
)
def test_the_preset_of_a_name(name: str, gib: int, preset: str) -> None:
    seen = detect.Seen(
        host="a", device=name, memory_bytes=gib * 2**30, multiprocessors=8, cores=1
    )  # fmt: skip
    found = detect._device(seen, 1)
    assert found.name == preset
    assert (preset in presets.DEVICES) == (found.source == "datasheet")

"""What is meant to be one file: files of other names, in folders of one's own, work whole."""

import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from uuid import uuid4

ROOT = Path(__file__).parent.parent
GPT2 = (
    'hf:GPT2Config{"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 64, "n_positions": 32, '
    '"bos_token_id": 0, "eos_token_id": 0}'
)


def run(*command: str, **folders: Path) -> subprocess.CompletedProcess[str]:
    """A process of its own: folders are looked through once."""
    environment = os.environ | {f"MESHWRIGHT_{name}": str(path) for name, path in folders.items()}
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT, capture_output=True, text=True, timeout=300, env=environment,
    )  # fmt: skip


def name() -> str:
    return f"x{uuid4().hex[:8]}"


PRESET = '''
"""Nobody's accelerator."""

from meshwright.ir.device import OpCurve
from meshwright.ir.links import Network, link
from meshwright.ir.preset import Preset

PRESET = Preset(
    memory_gb=48, bandwidth_gb_s=1234, fp64=5, fp32=21, half=333, processors=99, cache_mb=33,
    matmul=OpCurve(share=0.77, floor_s=3e-6), reported="{name} 9000", accelerator="{name}-SKY",
    link=link("wire-{name}", 123, 5), network=Network(link("net-{name}", 7, 20), one_port=True),
)
'''


def test_a_preset(tmp_path: Path) -> None:
    """A cluster, a search with its price, the command line, exporters, YAML, and detecting it."""
    mine = name()
    (tmp_path / f"{mine}_pro.py").write_text(PRESET.format(name=mine))
    plan, key = tmp_path / "plan.json", f"{mine}-pro"
    (tmp_path / "cluster.yaml").write_text(
        f"name: own\nnodes: [{{count: 2, devices: {{{key}: 2}}, link: wire-{mine}}}]\n"
        f"between_nodes: net-{mine}\n"
    )
    done = run("-c", dedent(f"""
        from meshwright.cli import app
        from meshwright.ir import detect, plan_io
        from meshwright.ir.cluster import Cluster
        from meshwright.costmodel.offload import copy_s
        from meshwright.export import TARGETS, export
        cluster = Cluster.preset({key!r}, num_nodes=2, devices_per_node=2)
        device = cluster.device(0)
        assert device.peak("float16") == 333e12 and device.memory_bytes == 48 * 2**30
        assert cluster.nodes[0].link.bandwidth_bytes_per_s == 123e9
        assert cluster.between_nodes.bandwidth_bytes_per_s == 3.5e9
        assert copy_s(device, 10**9) > 0
        seen = detect.Seen("a", "NVIDIA {mine} 9000", 47 * 2**30, 8, 99)
        assert detect.describe([seen]).device_types == (device,)
        assert Cluster.load({str(tmp_path / "cluster.yaml")!r}).device_types == (device,)
        arguments = ["search", {GPT2!r}, "-b", "8", "-o", {str(plan)!r}, "--pin", "pp=1"]
        app([*arguments, "-c", "{key}:2x2"], standalone_mode=False)
        plan = plan_io.load({str(plan)!r})
        assert plan.predicted.step_s > 0 and plan.cluster.fingerprint == cluster.fingerprint
        for target in TARGETS:
            assert export(plan, target, cluster).text
        app(["export", {str(plan)!r}, "--to", "skypilot"], standalone_mode=False)
    """), PRESETS=tmp_path)  # fmt: skip
    assert done.returncode == 0 and f"{mine}-SKY:2" in done.stdout, done.stderr
    # Without the folder nobody knows it, and the error names what there is.
    other = run("-c", f"from meshwright.ir.presets import device; device({key!r})")
    assert "PlanError: no preset" in other.stderr and "h100-sxm" in other.stderr


def test_two_presets_that_disagree_are_refused(tmp_path: Path) -> None:
    (tmp_path / "l4.py").write_text(PRESET.format(name="z"))
    load = ("-c", "from meshwright.ir import presets")
    assert "a preset 'l4' is in" in run(*load, PRESETS=tmp_path).stderr
    (tmp_path / "l4.py").rename(tmp_path / "z.py")
    (tmp_path / "z.py").write_text(PRESET.replace("wire-{name}", "nvlink3").format(name="z"))
    assert "a link 'nvlink3' is described otherwise" in run(*load, PRESETS=tmp_path).stderr

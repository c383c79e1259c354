"""A SkyPilot task: nodes of one accelerator, a torchrun on each."""

import re
from typing import Any

import yaml

from meshwright.ir.presets import PRESETS
from meshwright.running.launch_shape import LaunchShape, launch_shape
from meshwright.tools.export.export import Exported, Request, shell, title_comment


def export(request: Request) -> Exported:
    shape = launch_shape(request.plan, request.cluster)
    resources, missing = _resources(shape)
    task = {
        "name": _name(request.plan.model.name),
        "num_nodes": shape.num_nodes,
        **({"resources": resources} if resources else {}),
        "workdir": ".",
        "run": _Block(_run(request, shape)),
    }
    text = yaml.dump(task, Dumper=_Dumper, sort_keys=False)
    return Exported(f"{title_comment(request.plan)}\n{text}", (*shape.missing, *missing))


def _name(model: str) -> str:
    """A legal name of a cluster: it begins with a letter."""
    plain = re.sub(r"[^a-z0-9]+", "-", model.lower()).strip("-")
    return plain if plain[:1].isalpha() else f"model-{plain}".strip("-")


def _resources(shape: LaunchShape) -> tuple[dict[str, str], tuple[str, ...]]:
    if not shape.on_gpu:
        return {"cpus": f"{shape.per_node}+"}, ()
    known = PRESETS.get(shape.device)
    if known is None or not known.accelerator:
        what = f"device type {shape.device!r}, for which no accelerator name is known"
        return {}, (f"{what}: set resources.accelerators",)
    return {"accelerators": f"{known.accelerator}:{shape.per_node}"}, ()


def _run(request: Request, shape: LaunchShape) -> str:
    return f"""\
export OMP_NUM_THREADS="${{OMP_NUM_THREADS:-1}}"
MASTER_ADDR="$(echo "$SKYPILOT_NODE_IPS" | head -n 1)"
torchrun --nnodes "$SKYPILOT_NUM_NODES" --nproc-per-node {shape.per_node} \\
  --node-rank "$SKYPILOT_NODE_RANK" --master-addr "$MASTER_ADDR" --master-port 29500 \\
  {shell(request.command)}
"""


class _Block(str):
    """A text that is written as a block of lines."""


class _Dumper(yaml.SafeDumper):
    pass


def _represent(dumper: _Dumper, text: _Block) -> Any:
    return dumper.represent_scalar("tag:yaml.org,2002:str", str(text), style="|")


_Dumper.add_representer(_Block, _represent)

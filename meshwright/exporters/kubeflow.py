"""A TrainJob for Kubeflow Trainer, on its runtime `torch-distributed`."""

import re
from typing import Any

import yaml

from meshwright.running.launch_shape import launch_shape
from meshwright.tools.export.export import Exported, Request, title_comment


def export(request: Request) -> Exported:
    shape = launch_shape(request.plan, request.cluster)
    trainer: dict[str, Any] = {
        "numNodes": shape.num_nodes,
        "numProcPerNode": shape.per_node,
        # The runtime sets PET_NNODES and the like, from which torchrun takes its flags.
        "command": ["torchrun", *request.command],
    }
    if shape.on_gpu:
        limits = {"nvidia.com/gpu": shape.per_node}
        trainer["resourcesPerNode"] = {"requests": limits.copy(), "limits": limits.copy()}
    job = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": _name(request)},
        "spec": {"runtimeRef": {"name": "torch-distributed"}, "trainer": trainer},
    }
    missing = (
        *shape.missing,
        "the container image with your code, the plan and meshwright: set spec.trainer.image",
    )
    text = yaml.safe_dump(job, sort_keys=False)
    return Exported(f"{title_comment(request.plan)}\n{text}", missing)


def _name(request: Request) -> str:
    """A legal name of a Kubernetes object."""
    model = re.sub(r"[^a-z0-9]+", "-", request.plan.model.name.lower()).strip("-")
    made_of = re.sub(r"[^0-9a-f]", "", request.plan.hash)[:8]
    return f"{model[:40].strip('-') or 'model'}-{made_of or 'plan'}"

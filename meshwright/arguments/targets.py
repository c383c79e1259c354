"""What a command line names: a model, a cluster, a source of batches."""

import difflib
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.arguments.hf_target import build_huggingface
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.errors import PlanError
from meshwright.ir.plan.plan import Plan
from meshwright.ir.presets import device
from meshwright.ir.text.plain_text import shown

if TYPE_CHECKING:
    from torch import nn

_HF = re.compile(r"hf:(\w+)(\{.*\})?", re.DOTALL)
_CODE = re.compile(r"[\w.]+:\w+")
_LOCAL = "local"
"""The machine that the process is on: so many devices of it."""
_PRESET = re.compile(r"([\w.-]+):([0-9]{1,12})(?:x([0-9]{1,12}))?")


@dataclass(frozen=True)
class Target:
    """A model to plan for, with what it needs to be traced and trained."""

    model: "nn.Module"
    example_inputs: Any = None
    loss_fn: Callable[..., Any] | None = None


def load_target(text: str, *, meta: bool = False) -> Target:
    """The model that `module:callable` returns, or that an `hf:ConfigClass{json}` describes.

    The callable returns the model, or a tuple (model, example_inputs) or (model, example_inputs,
    loss_fn). With `meta`, a Hugging Face model is built without allocating weights. torch is
    seeded before, so that all ranks of a job build the same weights.
    """
    import torch

    torch.manual_seed(0)
    if match := _HF.fullmatch(text):
        return Target(build_huggingface(match[1], match[2] or "{}", meta=meta))
    if not _CODE.fullmatch(text):
        raise PlanError(
            f"target {shown(text)} is neither module:callable nor hf:ConfigClass{{...}}; for "
            'example train:build_model or hf:GPT2Config{"n_layer": 4}' + _path_hint(text)
        )
    return _target(text, load_callable(text, "target")())


def load_callable(text: str, what: str) -> Callable[[], Any]:
    """What `module:callable` names; what the module itself raises is left for the user to see."""
    module_name, _, name = text.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")
    hint = _path_hint(text)
    if hint or not _CODE.fullmatch(text):
        raise PlanError(f"{what} {shown(text)} is not a module:callable{hint}")
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # something that the module needs
        raise PlanError(f"{what} {shown(text)} cannot be loaded: {error}") from error
    found = getattr(module, name, None)
    if not callable(found):
        near = "".join(difflib.get_close_matches(name[:80], dir(module), 1))
        hint = f"; nearest is {near!r}" if near else ""
        raise PlanError(
            f"{what} {shown(text)}: module {module_name} has no callable {name!r}{hint}"
        )
    made: Callable[[], Any] = found
    return made


def _path_hint(text: str) -> str:
    """For a file where a module is meant."""
    path, _, name = text.partition(":")
    if not path.endswith(".py") or not name.isidentifier():
        return ""
    module = path.removesuffix(".py").removeprefix("./").strip("/").replace("/", ".")
    return f"; {path!r} is a file, its module is {module!r}: write {module}:{name}"


def _target(text: str, built: Any) -> Target:
    from torch import nn

    parts = built if isinstance(built, tuple) else (built,)
    if not 1 <= len(parts) <= 3 or not isinstance(parts[0], nn.Module):
        kinds = ", ".join(type(part).__name__ for part in parts[:4])
        raise PlanError(
            f"target {shown(text)} returned ({kinds}); it must return a torch.nn.Module, or a "
            "tuple (model, example_inputs) or (model, example_inputs, loss_fn)"
        )
    return Target(*parts)


def load_cluster(text: str) -> Cluster:
    """`local:4`, a preset such as `h100-sxm:8x8` (nodes x devices per node), or a YAML file."""
    if text.endswith((".yaml", ".yml")):
        return Cluster.load(Path(text))
    return preset_cluster(text)


def preset_cluster(text: str) -> Cluster:
    """The cluster of a name alone, `local:4` or `h100-sxm:8x8`."""
    match = _PRESET.fullmatch(text)
    if not match:
        raise PlanError(
            f"cluster {shown(text)} is none of local:N, PRESET:NODESxDEVICES and FILE.yaml; for "
            "example local:4 or h100-sxm:8x8"
        )
    name, first, second = match[1], int(match[2]), match[3]
    if name == _LOCAL:
        return Cluster.local(first)
    device(name, _LOCAL)
    if second is None:
        return Cluster.preset(name, num_nodes=1, devices_per_node=first)
    return Cluster.preset(name, num_nodes=first, devices_per_node=int(second))


def cluster_of(plan: Plan, text: str | None) -> Cluster:
    """The cluster that `text` names, or the plan's own if that is a preset; plans name no files."""
    if text is not None:
        return load_cluster(text)
    try:
        return preset_cluster(plan.cluster.name)
    except PlanError as error:
        raise PlanError(
            f"the plan is for cluster {plan.cluster.name!r}, which is no preset; give --cluster"
        ) from error

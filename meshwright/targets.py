"""What a command line names: a model, a cluster, a source of batches."""

import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.ir.cluster import Cluster
from meshwright.ir.errors import PlanError
from meshwright.ir.plan import Plan

if TYPE_CHECKING:
    from torch import nn

_HF = re.compile(r"hf:(\w+)(\{.*\})?", re.DOTALL)
_CODE = re.compile(r"[\w.]+:\w+")
_PRESET = re.compile(r"([\w.-]+):(\d+)(?:x(\d+))?")


@dataclass(frozen=True)
class Target:
    """A model to plan for, with what it needs to be traced and trained."""

    model: "nn.Module"
    example_inputs: Any = None
    loss_fn: Callable[..., Any] | None = None


def load_target(text: str, *, meta: bool = False) -> Target:
    """The model that `module:callable` returns, or that an `hf:ConfigClass{json}` describes.

    The callable returns the model, or a tuple (model, example_inputs) or (model, example_inputs,
    loss_fn). With `meta`, a Hugging Face model is built without allocating weights.
    """
    if match := _HF.fullmatch(text):
        return Target(_huggingface(match[1], match[2] or "{}", meta=meta))
    if not _CODE.fullmatch(text):
        raise PlanError(
            f"target {text!r} is neither module:callable nor hf:ConfigClass{{...}}; for example "
            'train:build_model or hf:GPT2Config{"n_layer": 4}'
        )
    module, name = text.split(":")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        built = getattr(import_module(module), name)()
    except (ImportError, AttributeError) as error:
        raise PlanError(f"target {text!r} cannot be loaded: {error}") from error
    return Target(*built) if isinstance(built, tuple) else Target(built)


def _huggingface(name: str, settings: str, *, meta: bool) -> "nn.Module":
    import torch
    import transformers

    logging: Any = transformers.logging
    logging.set_verbosity_error()  # the model is built here, so the user cannot mend its warnings
    config_class = getattr(transformers, name, None)
    if not name.endswith("Config") or config_class is None:
        raise PlanError(f"transformers has no configuration class {name!r}, such as GPT2Config")
    try:
        config = config_class(**json.loads(settings))
    except (json.JSONDecodeError, TypeError) as error:
        raise PlanError(f"hf:{name}: the settings {settings!r} are not valid: {error}") from error
    config.use_cache = False
    for auto in _auto_classes(transformers, config):
        if type(config) in auto._model_mapping:
            with torch.device("meta" if meta else "cpu"):
                model: nn.Module = auto.from_config(config)
            return model
    raise PlanError(f"hf:{name}: transformers has no model with a training loss for it")


def _auto_classes(transformers: Any, config: Any) -> Iterator[Any]:
    """Heads with a loss, most specific first: BERT and the like are trained on masked tokens."""
    if getattr(config, "is_encoder_decoder", False):
        yield transformers.AutoModelForSeq2SeqLM
    yield transformers.AutoModelForMaskedLM
    yield transformers.AutoModelForCausalLM
    yield transformers.AutoModelForImageClassification


def load_cluster(text: str) -> Cluster:
    """`local:4`, a preset such as `h100-sxm:8x8` (nodes x devices per node), or a YAML file."""
    if text.endswith((".yaml", ".yml")):
        return Cluster.load(Path(text))
    match = _PRESET.fullmatch(text)
    if not match:
        raise PlanError(
            f"cluster {text!r} is none of local:N, PRESET:NODESxDEVICES and FILE.yaml; for example "
            "local:4 or h100-sxm:8x8"
        )
    name, first, second = match[1], int(match[2]), match[3]
    if name == "local":
        return Cluster.local(first)
    if second is None:
        return Cluster.preset(name, num_nodes=1, devices_per_node=first)
    return Cluster.preset(name, num_nodes=first, devices_per_node=int(second))


def cluster_of(plan: Plan, text: str | None) -> Cluster:
    """The cluster that `text` names, or the plan's own if that is a preset."""
    if text is not None:
        return load_cluster(text)
    try:
        return load_cluster(plan.cluster.name)
    except PlanError as error:
        raise PlanError(
            f"the plan is for cluster {plan.cluster.name!r}, which is no preset; give --cluster"
        ) from error

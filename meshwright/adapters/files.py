"""Adapters as files, apart from the model that they are beside: peft's own where a model is peft's,
else `adapter.safetensors` with `adapter.json`."""

import json
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from meshwright.adapters.adapted_linear import AdaptedLinear
from meshwright.ir.errors import PlanError
from meshwright.ir.text.canonical import parse_json, read_text
from meshwright.runtime.checkpoint.export import check_writable
from meshwright.runtime.job.whole import whole_parameters, write_parameters

if TYPE_CHECKING:
    from meshwright.runtime.job.job import Job

WEIGHTS, SHAPES = "adapter.safetensors", "adapter.json"
PEFT_WEIGHTS, PEFT_SHAPES = "adapter_model.safetensors", "adapter_config.json"


def save_adapter(job: "Job", folder: str | Path) -> Path | None:
    """Writes what a job trains of its model, and nothing of the base; every rank calls it, and rank
    0 gets the folder.

    Of a peft model the files are those that `PeftModel.from_pretrained` reads, else those of
    `load_adapter`. PlanError if the model has no adapters, or trains more than these.
    """
    check_writable(job, "the adapter")
    names = trained_names(job.model)
    found = {fqn: whole.cpu() for fqn, whole in whole_parameters(job, trained=True)}
    if job.parts.rank != 0:
        return None
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if _is_peft(job.model):
        for config in job.model.peft_config.values():  # type: ignore[operator]
            config.save_pretrained(str(folder))
        keys, weights = _peft_keys(job.model), PEFT_WEIGHTS
    else:
        (folder / SHAPES).write_text(json.dumps(_shapes(job.model), indent=1, sort_keys=True))
        keys, weights = {name: name for name in names}, WEIGHTS
    content = {key: found[name].contiguous() for key, name in keys.items() if name in found}
    save_file(content, folder / weights, metadata={"format": "pt"})
    return folder


def load_adapter(target: "nn.Module | Job", folder: str | Path) -> None:
    """Puts the values of files of `save_adapter` into a model or, on every rank, into a job.

    A model without adapters gets them; one of peft is loaded by peft. PlanError where files and
    model do not go together, with what differs.
    """
    folder = Path(folder)
    model = target if isinstance(target, nn.Module) else target.model
    is_peft = _is_peft(model)
    if isinstance(target, nn.Module) and not is_peft:
        _put(model, _read_shapes(folder))
    path = folder / (PEFT_WEIGHTS if is_peft else WEIGHTS)
    if not path.is_file():
        raise PlanError(f"{path} does not exist; `save_adapter` writes it")
    names = _peft_keys(model) if is_peft else {name: name for name in trained_names(model)}
    values = _named(load_file(path), names, model, path)
    if isinstance(target, nn.Module):
        known = dict(model.named_parameters())
        with torch.no_grad():
            for name, value in values.items():
                known[name].copy_(value)
        return
    write_parameters(target, lambda fqn, whole: values[fqn].to(whole), trained=True)


def _named(
    found: Mapping[str, Tensor], names: Mapping[str, str], model: nn.Module, path: Path
) -> dict[str, Tensor]:
    """Values by the paths of the model's parameters."""
    known = dict(model.named_parameters())
    if odd := sorted(found.keys() ^ names.keys()):
        where = "the file" if odd[0] in found else "the model"
        raise PlanError(f"{path}: only {where} has {odd[0]!r}; take the adapters that it is of")
    values = {names[key]: value for key, value in found.items()}
    for name, value in values.items():
        if value.shape != known[name].shape:
            raise PlanError(
                f"{path}: {name} has shape {list(value.shape)}, and the model's has "
                f"{list(known[name].shape)}; take a model of the same shape"
            )
    return values


def _is_peft(model: nn.Module) -> bool:
    return hasattr(model, "peft_config")


def trained_names(model: nn.Module) -> list[str]:
    """Paths of all that is trained, which is of adapters."""
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    own = {
        f"{path}.{name}" for path, m in model.named_modules() if isinstance(m, AdaptedLinear)
        for name in ("down", "up")
    }  # fmt: skip
    if _is_peft(model):
        own = set(_peft_keys(model).values())
    if not own:
        raise PlanError("the model has no adapters: save a checkpoint, or export it")
    if others := [name for name in trained if name not in own]:
        raise PlanError(
            f"{others[0]} is trained too, and is no part of an adapter: save a checkpoint, which "
            "has all"
        )
    return trained


def _peft_keys(model: nn.Module) -> dict[str, str]:
    """What peft calls each of an adapter's parameters in a file, and its path in the model."""
    paths = [name for name, _ in model.named_parameters()]
    numbers = {name: torch.tensor(index) for index, name in enumerate(paths)}
    state_dict = import_module("peft").get_peft_model_state_dict
    found: Mapping[str, Any] = state_dict(model, state_dict=numbers)
    return {key: paths[int(number)] for key, number in found.items()}


def _shapes(model: nn.Module) -> dict[str, Any]:
    return {
        path: {"kind": m.kind, "rank": m.rank, "alpha": m.alpha, "dropout": m.dropout}
        for path, m in model.named_modules() if isinstance(m, AdaptedLinear)
    }  # fmt: skip


def _read_shapes(folder: Path) -> Mapping[str, Any]:
    path = folder / SHAPES
    if not path.is_file():
        raise PlanError(f"{path} does not exist; `save_adapter` writes it")
    found: Mapping[str, Any] = parse_json(read_text(path), str(path))
    fields: dict[str, Any] = {
        "kind": str,
        "rank": int,
        "alpha": (int, float),
        "dropout": (int, float),
    }
    for name, said in found.items():
        good = isinstance(said, dict) and said.keys() == fields.keys()
        if not good or not all(isinstance(said[k], kind) for k, kind in fields.items()):
            raise PlanError(f"{path}: {name} has no {', '.join(fields)} of an adapter, and no more")
    return found


def _put(model: nn.Module, shapes: Mapping[str, Any]) -> None:
    """The model has adapters of these shapes."""
    here = _shapes(model)
    if here and here != shapes:
        odd = next(p for p in sorted({*here, *shapes}) if here.get(p) != shapes.get(p))
        raise PlanError(
            f"the model's adapter at {odd} is {here.get(odd)}, the file's {shapes.get(odd)}; take "
            "a model without adapters"
        )
    if here:
        return
    model.requires_grad_(False)
    for path, said in shapes.items():
        parent, _, name = path.rpartition(".")
        try:
            module = model.get_submodule(path)
        except AttributeError as error:
            raise PlanError(f"the model has no layer {path!r}, which has an adapter") from error
        made = AdaptedLinear(module, said["kind"], said["rank"], said["alpha"], said["dropout"])
        model.get_submodule(parent).register_module(name, made.train(module.training))

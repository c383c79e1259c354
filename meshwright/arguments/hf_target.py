"""`hf:ConfigClass{json}`: a model of transformers by its configuration, or why not."""

import difflib
import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from meshwright.ir.errors import PlanError
from meshwright.ir.text.canonical import parse_json
from meshwright.ir.text.plain_text import shown

if TYPE_CHECKING:
    from torch import nn

MAX_LAYERS = 20_000
"""Each is made as a module before anything is planned."""
_COUNTS = ("num_hidden_layers", "num_layers", "num_decoder_layers", "encoder_layers",
           "decoder_layers", "num_experts", "num_local_experts", "n_routed_experts")  # fmt: skip
_REFUSALS = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, OSError,
    RuntimeError, TypeError, ValueError,
)  # fmt: skip
"""How the library says that a value is not one of a setting: it does not check all of them."""


def build_huggingface(name: str, settings: str, *, meta: bool) -> "nn.Module":
    """The model with a training loss that the configuration describes; PlanError if there is none.

    With `meta`, no weights are allocated.
    """
    import torch
    import transformers
    from huggingface_hub.errors import StrictDataclassError

    refusals = (*_REFUSALS, StrictDataclassError)
    logging: Any = transformers.logging
    logging.set_verbosity_error()  # the model is built here, so the user cannot mend its warnings
    config_class = _config_class(transformers, name)
    given = parse_json(settings, f"the settings of hf:{name}")
    try:
        config = config_class(**given)
        config.use_cache = False
    except refusals as error:
        raise PlanError(_refused(name, "these settings", error)) from error
    _check_counts(name, config)
    for auto in _auto_classes(transformers, config):
        if type(config) in auto._model_mapping:
            _check_names(name, given, config_class, auto._model_mapping[type(config)])
            try:
                with torch.device("meta" if meta else "cpu"):
                    model: nn.Module = auto.from_config(config)
            except refusals as error:
                raise PlanError(_refused(name, "a model of these settings", error)) from error
            return model
    raise PlanError(f"hf:{name}: transformers has no model with a training loss for it")


def _config_class(transformers: Any, name: str) -> Any:
    try:
        found = getattr(transformers, name, None)
    except _REFUSALS as error:
        raise PlanError(f"hf:{name}: transformers cannot load it: {error}") from error
    if name.endswith("Config") and hasattr(found, "model_type"):
        return found
    names = [n for n in dir(transformers) if n.endswith("Config") and n != name]
    near = "".join(difflib.get_close_matches(name[:80], names, 1))
    hint = f"nearest is {near!r}" if near else "such as GPT2Config"
    raise PlanError(f"transformers has no configuration class {shown(name)}; {hint}")


def _refused(name: str, what: str, error: BaseException) -> str:
    told = " ".join(str(error).split()) or "it does not say why"
    return f"hf:{name}: transformers refuses {what}: {type(error).__name__}: {told[:400]}"


def _check_counts(name: str, config: Any) -> None:
    for key in _COUNTS:
        count = getattr(config, key, None)
        if isinstance(count, int) and not 0 <= count <= MAX_LAYERS:
            raise PlanError(f"hf:{name}: {key} is {shown(count)}; it must be 0 to {MAX_LAYERS:,}")


def _check_names(name: str, given: Mapping[str, Any], config_class: Any, model_class: Any) -> None:
    """PlanError for a setting that neither the configuration nor the model reads: the library keeps
    such ones and says nothing."""
    known = {*inspect.signature(config_class).parameters, *config_class.attribute_map}
    for key in given:
        if key not in known and not hasattr(config_class, key):
            if any(
                re.search(rf"\b{re.escape(key)}\b", s) for s in _sources(config_class, model_class)
            ):
                continue
            near = "".join(difflib.get_close_matches(key[:80], known, 1, 0.0))
            raise PlanError(f"hf:{name}: no setting {shown(key)}; nearest is {near!r}")


def _sources(*classes: Any) -> Iterator[str]:
    """The code of the library's modules that define the classes and their bases."""
    bases = (base for one in classes for base in one.__mro__)
    for module in dict.fromkeys(base.__module__ for base in bases):
        if module.startswith("transformers."):
            yield inspect.getsource(sys.modules[module])


def _auto_classes(transformers: Any, config: Any) -> Iterator[Any]:
    """Heads with a loss, most specific first: BERT and the like are trained on masked tokens."""
    if getattr(config, "is_encoder_decoder", False):
        yield transformers.AutoModelForSeq2SeqLM
    yield transformers.AutoModelForMaskedLM
    yield transformers.AutoModelForCausalLM
    yield transformers.AutoModelForImageClassification

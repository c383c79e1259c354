"""Random operators that give constants, so that two ways to compute a step can be compared.

Two layouts of a model draw their numbers in other orders. Inside `Still` every draw gives one
constant of its distribution, the lower quartile or half a standard deviation: noise that emitted
code draws by itself (`codegen.sharded.noise`) is the same. Dropout keeps all and scales as in
training.
"""

from collections.abc import Callable, Mapping
from math import floor, log1p, pi, tan
from typing import Any

import torch
from torch import Tensor

from meshwright.ir.errors import MeshwrightError
from meshwright.ir.torch_private import DispatchMode, OpOverload

QUANTILE = 0.25
"""The number that is drawn between 0 and 1."""
DEVIATION = 0.5
"""The number that is drawn of a normal distribution."""


class Unsettled(MeshwrightError):
    """An operator draws random numbers and has no constant form."""


def is_random(operator: OpOverload) -> bool:
    """Whether it draws from torch's generators."""
    return torch.Tag.nondeterministic_seeded in operator.tags


def _bernoulli(shape: Tensor, given: Mapping[str, Any]) -> Tensor:
    p = given.get("p")
    chance = given["self"] if p is None else p
    return torch.as_tensor(QUANTILE < chance, device=shape.device).to(shape.dtype).expand_as(shape)


def _normal(shape: Tensor, given: Mapping[str, Any]) -> Tensor:
    return _filled(shape, given.get("mean", 0.0) + DEVIATION * given.get("std", 1.0))


def _log_normal(shape: Tensor, given: Mapping[str, Any]) -> Tensor:
    return _normal(shape, given).exp()


def _uniform(shape: Tensor, given: Mapping[str, Any]) -> Tensor:
    low, high = given.get("from", 0.0), given.get("to", 1.0)
    return _filled(shape, low + QUANTILE * (high - low))


def _whole(shape: Tensor, given: Mapping[str, Any]) -> Tensor:
    low = given.get("low", given.get("from")) or 0
    high = given.get("high", given.get("to"))
    return _filled(shape, low if high is None else low + floor(QUANTILE * (high - low)))


def _exponential(shape: Tensor, given: Mapping[str, Any]) -> Tensor:
    return _filled(shape, -log1p(-QUANTILE) / given.get("lambd", 1.0))


def _cauchy(shape: Tensor, given: Mapping[str, Any]) -> Tensor:
    return _filled(shape, given["median"] + given["sigma"] * tan(pi * (QUANTILE - 0.5)))


def _in_order(shape: Tensor, given: Mapping[str, Any]) -> Tensor:
    return torch.arange(shape.numel(), device=shape.device, dtype=shape.dtype).view(shape.shape)


def _filled(shape: Tensor, value: float | Tensor) -> Tensor:
    return torch.as_tensor(value, device=shape.device).to(shape.dtype).expand_as(shape)


_CONSTANTS: dict[str, Callable[[Tensor, Mapping[str, Any]], Tensor]] = {
    "bernoulli": _bernoulli, "bernoulli_": _bernoulli, "normal": _normal, "normal_": _normal,
    "rand": _uniform, "rand_like": _uniform, "uniform": _uniform, "uniform_": _uniform,
    "randn": _normal, "randn_like": _normal, "log_normal": _log_normal, "log_normal_": _log_normal,
    "exponential": _exponential, "exponential_": _exponential, "cauchy": _cauchy,
    "cauchy_": _cauchy, "randint": _whole, "randint_like": _whole, "random": _whole,
    "random_": _whole, "randperm": _in_order,
}  # fmt: skip


class Still(DispatchMode):  # type: ignore[misc]
    """Inside, random operators give constants; Unsettled names one that cannot."""

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not is_random(func):
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        declared = func._schema.arguments
        # Defaults are not passed on.
        given: dict[str, Any] = {a.name: a.default_value for a in declared if a.has_default_value()}
        given |= dict(zip((a.name for a in declared), args, strict=False)) | kwargs
        if name == "native_dropout":
            return _all_kept(**given)
        if name not in _CONSTANTS:
            if not given.get("dropout_p", given.get("dropout", 1.0)):
                return func(*args, **kwargs)  # attention, a recurrent net
            raise Unsettled(f"aten.{name} draws random numbers")
        drawn = func(*args, **kwargs)
        return drawn.copy_(_CONSTANTS[name](drawn, given))


def _all_kept(input: Tensor, p: float, train: bool | None = True) -> tuple[Tensor, Tensor]:
    kept = torch.ones_like(input, dtype=torch.bool)
    return (input / (1 - p) if train and p < 1 else input * (not train), kept)

"""How replicas agree on gradients: one form a file, whose name is its key in a plan."""

from collections.abc import Iterator
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType
from typing import cast

from meshwright.forms.sync.running import RunningForm
from meshwright.ir.errors import PlanError
from meshwright.ir.plan import Plan
from meshwright.ir.verify import Finding


def form(key: str) -> RunningForm:
    """Returns the half of the form `key` that runs; the key is that of a file in this folder."""
    return cast(RunningForm, _file(key))


@cache
def chosen() -> tuple[str, ...]:
    """Returns the forms that `Stage.sync` may name: those whose files say what is legal."""
    return tuple(
        sorted(key for _, key, _ in iter_modules(__path__) if hasattr(_file(key), "check"))
    )


def findings(plan: Plan) -> Iterator[Finding]:
    """Yields what is wrong with the forms that a plan's stages name."""
    for index, stage in enumerate(plan.stages):
        if stage.sync is None:
            continue
        key = stage.sync.form
        if key not in chosen():
            near = get_close_matches(key[:64], chosen(), 1, 0.0)
            message = f"stage {index}: {key[:64]!r} is no form of synchronisation to choose"
            yield Finding("sync", message, f"{near[0]}, or no sync")
            continue
        for message, nearest in _file(key).check(stage):
            yield Finding("sync", f"stage {index}: {message}", nearest)
        if stage.dp == 1:
            message = f"stage {index}: sync {key} has no effect without replicas"
            yield Finding("sync", message, "no sync", "warning")


def check(plan: Plan) -> None:
    """PlanError with the first error that `findings` has."""
    for finding in findings(plan):
        if finding.severity == "error":
            raise PlanError(str(finding))


def _file(key: str) -> ModuleType:
    return import_module(f"meshwright.forms.sync.{key}")

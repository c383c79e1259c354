"""How replicas agree on gradients, one file a form; the file name is its key. MESHWRIGHT_SYNC names
folders with more.

A file has `describe(replicas)`, what the form does in a step, as an `Exchange`, and `build(slots,
lines, stage)`, which makes what does it on a rank (`running`). If plans may choose it by name, it
has `check(stage)` too: what is wrong with its settings, and what would be right; its `describe` is
also told whether the optimizer's rows are sharded, and the settings. With `EXACT` a search may
choose it, with the settings in `OFFERS`.
"""

import sys
from collections.abc import Iterator
from functools import cache
from types import ModuleType
from typing import cast

from meshwright.forms.exchange import Exchange
from meshwright.forms.running import RunningForm
from meshwright.ir.errors import PlanError
from meshwright.ir.extensions import Files, add_folders, nearest
from meshwright.ir.plan.plan import Plan, Stage, SyncChoice
from meshwright.ir.plan.verify import Finding
from meshwright.ir.text.plain_text import SHOWN

add_folders("MESHWRIGHT_SYNC", __path__)
_FILES = Files(sys.modules[__name__], "form of synchronisation")


@cache
def exchange(name: str, replicas: int) -> Exchange:
    """Returns what a form does among so many replicas. PlanError names the nearest known form."""
    made: Exchange = _half(name, "describe").describe(replicas)
    return made


def exchange_of(stage: Stage) -> Exchange:
    """Returns what a stage of a plan does."""
    if stage.sync is None or stage.dp == 1:
        return exchange(stage.sync_form, stage.dp)
    settings = tuple(sorted(stage.sync.settings.items()))
    return _chosen_exchange(stage.sync_form, stage.dp, stage.is_sharded, settings)


@cache
def _chosen_exchange(
    name: str, replicas: int, sharded: bool, settings: tuple[tuple[str, int], ...]
) -> Exchange:
    made: Exchange = _half(name, "describe").describe(replicas, sharded, dict(settings))
    return made


def running(name: str) -> RunningForm:
    """Returns the half of a form that runs. PlanError names the nearest known form."""
    return cast(RunningForm, _half(name, "build"))


def _half(name: str, has: str) -> ModuleType:
    found: ModuleType = _FILES.load(name)
    if not hasattr(found, has):
        raise PlanError(f"{name!r} is no form of synchronisation: its file has no {has}()")
    return found


@cache
def chosen() -> tuple[str, ...]:
    """Returns the forms that `Stage.sync` may name: those whose files say what is legal."""
    return tuple(sorted(key for key in _FILES.names if hasattr(_FILES.load(key), "check")))


def offers(key: str) -> Iterator[SyncChoice]:
    """Yields the choices of a form that a search tries: none of one that changes what is computed,
    which only the user may ask for."""
    found = _FILES.load(key)
    if getattr(found, "EXACT", False):
        tried: tuple[dict[str, int], ...] = getattr(found, "OFFERS", ({},))
        for settings in tried:
            yield SyncChoice(form=key, settings=settings)


def exact(key: str) -> bool:
    """Returns whether a form computes what one process does: those that `zero` names do, a form
    that plans may choose as its file says."""
    found = _FILES.load(key)
    return not hasattr(found, "check") or bool(getattr(found, "EXACT", False))


def suits(key: str, zero: int) -> bool:
    """Returns whether a form that plans may choose goes together with a level of `Stage.zero`."""
    stage = Stage(
        first="", last="", mesh={}, devices=(), batch_shares=(), zero=zero,  # type: ignore[arg-type]
        sync=SyncChoice(form=key),
    )  # fmt: skip
    return not any(_FILES.load(key).check(stage))


def findings(plan: Plan) -> Iterator[Finding]:
    """Yields what is wrong with the forms that a plan's stages name."""
    for index, stage in enumerate(plan.stages):
        if stage.sync is None:
            continue
        key = stage.sync.form[:SHOWN]
        if key not in chosen():
            message = f"stage {index}: {key!r} is no form of synchronisation to choose"
            yield Finding("sync", message, f"{nearest(key, chosen())}, or no sync")
            continue
        for message, near in _FILES.load(key).check(stage):
            yield Finding("sync", f"stage {index}: {message}", near)
        if stage.dp == 1:
            message = f"stage {index}: sync {key} has no effect without replicas"
            yield Finding("sync", message, "no sync", "warning")


def check(plan: Plan) -> None:
    """PlanError with the first error that `findings` has."""
    for finding in findings(plan):
        if finding.severity == "error":
            raise PlanError(str(finding))

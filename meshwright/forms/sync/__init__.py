"""How replicas agree on gradients, one file a form; the file name is its key. MESHWRIGHT_SYNC names
folders with more.

A file has `describe(replicas)`, what the form does in a step, as an `Exchange`, and `build(slots,
lines, stage)`, which makes what does it on a rank (`running`). If plans may choose it by name, it
has `check(stage)` too: what is wrong with its settings, and what would be right; its `describe` is
also told whether the optimizer's rows are sharded, and the settings. With `EXACT` every search
tries it; `offers(parameters)` says with which values of its settings, if it has any.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from types import ModuleType
from typing import cast

from meshwright.forms.exchange import Exchange
from meshwright.forms.running import RunningForm
from meshwright.forms.updates import UPDATES, Reach, update
from meshwright.ir.errors import PlanError
from meshwright.ir.extensions import Files, add_folders, nearest
from meshwright.ir.plan.finding import Finding
from meshwright.ir.plan.plan import Plan, Stage, SyncChoice
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
    return chosen_exchange(stage.sync_form, stage.dp, stage.is_sharded, settings)


@cache
def chosen_exchange(
    name: str, replicas: int, sharded: bool, settings: tuple[tuple[str, int], ...] = ()
) -> Exchange:
    """Returns what a form that plans may choose does; `sharded`: with rows for each replica's
    optimizer. Settings that are left out are as its file says."""
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


@cache
def is_exact(key: str) -> bool:
    """Returns whether a form computes what plain training does, so that a search may choose it. One
    that changes what is computed only the user may ask for. Those that `zero` names are exact."""
    found = _FILES.load(key)
    return not hasattr(found, "check") or bool(getattr(found, "EXACT", False))


def offers(key: str, parameters: Sequence[int]) -> Mapping[str, Sequence[int]]:
    """Returns the values of a form's settings that are worth trying in a stage whose parameters
    have so many bytes, each in the order in which to try them; what is left out is as its file
    says."""
    found = _FILES.load(key)
    if not hasattr(found, "offers"):
        return {}
    tried: Mapping[str, Sequence[int]] = found.offers(parameters)
    return tried


@cache
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
        for finding in of_stage(stage, plan.optimizer):
            yield replace(finding, message=f"stage {index}: {finding.message}")


def of_stage(stage: Stage, optimizer: str) -> Iterator[Finding]:
    """Yields what is wrong with the form that a stage names."""
    if stage.sync is None:
        return
    key = stage.sync.form[:SHOWN]
    if key not in chosen():
        message = f"{key!r} is no form of synchronisation to choose"
        yield Finding("sync", message, f"{nearest(key, chosen())}, or no sync")
        return
    wrong = list(_FILES.load(key).check(stage))
    for message, near in wrong:
        yield Finding("sync", message, near)
    if stage.dp == 1:
        yield Finding("sync", f"sync {key} has no effect without replicas", "no sync", "warning")
    elif not wrong and _updates_buckets(stage) and optimizer in UPDATES:
        if (reach := update(optimizer).reach) is Reach.GROUP:
            message = f"sync {key} steps bucket after bucket, {optimizer} looks at {reach.value}"
            yield Finding("sync", message, "no sync")


def _updates_buckets(stage: Stage) -> bool:
    """Whether parameters are stepped as their gradients come, some before others."""
    return any(send.what == "gradients" for send in exchange_of(stage).late)


def check(plan: Plan) -> None:
    """PlanError with the first error that `findings` has."""
    for finding in findings(plan):
        if finding.severity == "error":
            raise PlanError(str(finding))

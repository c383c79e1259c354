"""How replicas agree on gradients, one file a form; the file name is its key. MESHWRIGHT_SYNC names
folders with more.

A file has `describe(replicas)`, what the form does in a step, as an `Exchange` without what its
parameters' store does, and `build(slots, lines, stage, store)`, which makes what does it on a rank
(`running`). `STORE` is the store that it takes where a plan names none; `SPLIT` says whether it
takes stores that are.

If plans may choose it by name, it has `check(stage)` too: what is wrong with its settings, and
what would be right; its `describe` is also told what `zero` shards beside it, and the settings.
With `SHAPES` it is told the `shapes` of a stage's trained parameters too, where they are known,
with `SHARDS` the ranks of dp_shard.

With `TAPS` its run is told what layers read and the gradients of what they made; what is wrong with
it for parameters of a model `check_parameters(plan, graph, index, stage, paths)` says.

With `FOLDS` its replicas may lie along model axes too (`ir.plan.folded`).

With `EXACT` every search tries it for whole stages, unless it says that it is not `SEARCHED`;
`offers(parameters)` says with which values of its settings, if it has any. Else a search tries it,
with the settings of `ladder()`, only if the user allows what `CHANGES` names, and plans say in
their first lines what it `GIVES_UP`. Without `CLIPS` gradients cannot be clipped under it.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from types import ModuleType
from typing import cast

from meshwright.forms.exchange import Exchange
from meshwright.forms.exchange_rows import Shaped
from meshwright.forms.exchange_rules import checked
from meshwright.forms.running import RunningForm
from meshwright.forms.storage import USUAL, alone, is_split, keeps_rows, stated_by, stored_rows
from meshwright.ir.errors import PlanError
from meshwright.ir.extensions import Files, add_folders
from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan.parameters import views_of
from meshwright.ir.plan.plan import FormChoice, Plan, Setting, Stage, sync_name

add_folders("MESHWRIGHT_SYNC", __path__)
_FILES = Files(sys.modules[__name__], "form of synchronisation")
IDS = "ids"
"""The setting that names the input whose values are the rows that a form has."""
USUAL_FORM = sync_name(0, 1)
"""The form of a stage without replicas."""
_Settings = tuple[tuple[str, Setting], ...]


def exchange(name: str, replicas: int) -> Exchange:
    """Returns what a form does among so many replicas, with the store that it names. PlanError
    names the nearest known form."""
    return _made(name, replicas, None, usual_store(name, 0), None)


def chosen_exchange(
    name: str,
    replicas: int,
    shards: int,
    zero: int,
    settings: _Settings = (),
    store: str = "",
) -> Exchange:
    """Returns what a form that plans may choose does, as `exchange_of` for a stage; `shards`: ranks
    of dp_shard; `zero`: what is sharded beside it, 0 where there is nobody to share with; `store`:
    one that all stages are asked to have, if any, which those have that it goes with. Settings that
    are left out are as files say."""
    told = zero, settings
    if store and is_split(store) == takes_parts(name, zero):
        return _made(name, replicas, told, store, (), (), shards)
    return _made(name, replicas, told, usual_store(name, zero), None, (), shards)


def stored_exchange(name: str, replicas: int, zero: int, store: str) -> Exchange:
    """Returns what a form that `zero` is short for does with parameters in a store that plans may
    choose, with its settings as its file says; in its own where that does not go together."""
    if not goes_with(name, replicas, zero, store):
        return exchange(name, replicas)
    return _made(name, replicas, None, store, ())


@cache
def goes_with(name: str, replicas: int, zero: int, store: str) -> bool:
    """Tells whether a form that `zero` is short for goes with a store that plans may choose."""
    if keeps_rows(store) or is_split(store) != takes_parts(name, zero):
        return False
    try:
        _made(name, replicas, None, store, ())
    except PlanError:
        return False
    return True


def described(name: str, replicas: int) -> Exchange:
    """Returns what a form does by itself, its store left out."""
    made: Exchange = _half(name, "describe").describe(replicas)
    return made


def exchange_of(stage: Stage, shapes: tuple[Shaped, ...] = (), *, rests: bool = False) -> Exchange:
    """Returns what a stage of a plan does, but for parameters that it treats apart
    (`ir.plan.parameters.groups_of`). `shapes`: of its trained parameters on a rank, for a form that
    `needs_shapes`; without them it is taken to send all. `rests`: what has no gradient need not be
    stepped (`forms.updates`)."""
    told = (level_of(stage), _sorted(stage.sync)) if stage.sync and stage.dp > 1 else None
    stored = _sorted(stage.store) if stage.store else None
    shards = stage.mesh.get("dp_shard", 1)
    store = store_of(stage)
    return _made(stage.sync_form, stage.dp, told, store, stored, shapes, shards, rests)


@cache
def needs_shapes(key: str) -> bool:
    """Tells whether what a form does depends on the shapes of parameters (`SHAPES`)."""
    return bool(getattr(_FILES.load(key), "SHAPES", False))


def store_of(stage: Stage) -> str:
    """Returns the key of the store that a stage's parameters are in."""
    return stage.store.form if stage.store else usual_store(stage.sync_form, level_of(stage))


def level_of(stage: Stage) -> int:
    """Returns what is sharded over dp_shard: `zero`, or nothing where there is nobody."""
    return stage.zero if stage.is_sharded else 0


@cache
def _made(
    name: str,
    replicas: int,
    told: tuple[int, _Settings] | None,
    store: str,
    stored: _Settings | None,
    shapes: tuple[Shaped, ...] = (),
    shards: int = 1,
    rests: bool = False,
) -> Exchange:
    half = _half(name, "describe")
    more: dict[str, object] = {"shapes": shapes} if shapes and told else {}
    if told and getattr(half, "SHARDS", False):
        more["shards"] = shards
    own: Exchange = half.describe(replicas, *((told[0], dict(told[1])) if told else ()), **more)
    if replicas == 1 and stored is not None:
        own = alone(store, stored) or own
    rows = (*stored_rows(store, replicas, stored), *own.rows)
    stated = {**own.stated, **(stated_by(store, stored) if stored is not None else {})}
    return checked(replace(own, form=name, rows=rows, stated=stated).stepping(some=rests))


def folds(view: Stage) -> bool:
    """Tells whether axes may be folded for parameters of a stage as it is for them: where the form
    that they have among replicas says so, and no store is named."""
    if view.store is not None:
        return False
    return form_folds(view.sync.form if view.sync else view.sync_form)


@cache
def form_folds(key: str) -> bool:
    """Tells whether the replicas of a form may lie along axes that are folded."""
    return key in _FILES.names and bool(getattr(_FILES.load(key), "FOLDS", False))


@cache
def usual_store(name: str, zero: int) -> str:
    """Returns the store that a form takes where a plan names none."""
    found = _FILES.load(name)
    return str(found.store(zero) if hasattr(found, "store") else getattr(found, "STORE", USUAL))


@cache
def takes_parts(name: str, zero: int) -> bool:
    """Tells whether a form takes stores of which a rank has its part, and no others."""
    found = _FILES.load(name)
    return bool(found.splits(zero) if hasattr(found, "splits") else getattr(found, "SPLIT", False))


def _sorted(choice: FormChoice) -> _Settings:
    return tuple(sorted(choice.settings.items()))


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


@cache
def changes(key: str) -> str:
    """Returns what a search must be allowed to choose a form that is not exact; empty: it may not
    choose it at all, or it is exact."""
    return "" if is_exact(key) else str(getattr(_FILES.load(key), "CHANGES", ""))


def ladder(key: str) -> Sequence[Mapping[str, Setting]]:
    """Returns the settings of a form that a search tries beside facts, those that change least
    first; exact ones have none."""
    found = _FILES.load(key)
    tried: Sequence[Mapping[str, Setting]] = found.ladder() if hasattr(found, "ladder") else ({},)
    return tried


def work_tries(key: str, message: float, value: float) -> Sequence[Mapping[str, Setting]]:
    """Returns the settings of a form by which its ranks share work on whole matrices out
    (`work_tries`), the first of which are usual; none: it has no such work. `message`, `value`:
    what it takes to begin to send, and to send a value, as numbers of multiplications."""
    found = _FILES.load(key)
    if not hasattr(found, "work_tries"):
        return ()
    tried: Sequence[Mapping[str, Setting]] = found.work_tries(message, value)
    return tried


@cache
def gives_up(key: str) -> str:
    """Returns what of plain training a form changes, in words; empty if it is exact."""
    if is_exact(key):
        return ""
    return str(getattr(_FILES.load(key), "GIVES_UP", "it changes what is computed"))


def given_up(plan: Plan) -> tuple[str, ...]:
    """Returns what of plain training a plan changes, in words."""
    forms = {view.sync_form for stage in plan.stages for view in views_of(stage) if view.dp > 1}
    known = sorted(forms & set(chosen()))
    return tuple(f"{form}: {gives_up(form)}" for form in known if gives_up(form))


@cache
def clips(key: str) -> bool:
    """Tells whether gradients may be clipped to a global norm under a form."""
    return bool(getattr(_FILES.load(key), "CLIPS", True))


@cache
def undone_by_norm(key: str) -> str:
    """Returns what to take in place of a form that clipping to a global norm makes useless
    (`UNDONE_BY_NORM`); empty: it does not."""
    return str(getattr(_FILES.load(key), "UNDONE_BY_NORM", ""))


@cache
def is_searched(key: str) -> bool:
    """Tells whether every search tries a form for whole stages."""
    return is_exact(key) and is_for_stages(key)


@cache
def for_tables(allow: frozenset[str] = frozenset()) -> tuple[str, ...]:
    """Lists the forms that searches try on embedding tables (`TABLES`): the exact ones, and those
    that change what is allowed to be."""
    known = (key for key in chosen() if facts_of_tables(key))
    return tuple(key for key in known if is_exact(key) or changes(key) in allow)


@cache
def facts_of_tables(key: str) -> tuple[str, ...]:
    """Lists the settings of a form that are facts of a table (`planner.finishing.tables`)."""
    return tuple(getattr(_FILES.load(key), "TABLES", ()))


@cache
def has_some_rows(key: str) -> bool:
    """Tells whether blocks have only the rows of a table that an input names (`ids`)."""
    return IDS in facts_of_tables(key)


def reads_some_rows(stage: Stage) -> bool:
    """Tells whether blocks of a stage have only the rows of its tables that an input names."""
    return bool(ids_of(stage))


def ids_of(stage: Stage) -> Mapping[str, str]:
    """Returns, of the form and the store of a stage under which blocks have only the rows that an
    input names, which input they were told."""
    found: dict[str, str] = {}
    if has_some_rows(stage.sync_form) and stage.sync is not None:
        found[stage.sync_form] = str(stage.sync.settings.get(IDS, ""))
    if stage.store is not None and keeps_rows(stage.store.form):
        found[stage.store.form] = str(stage.store.settings.get(IDS, ""))
    return found


@cache
def has_taps(key: str) -> bool:
    """Tells whether a form is told what layers read, and the gradients of what they made (`TAPS`):
    its run has a `tap`."""
    return bool(getattr(_FILES.load(key), "TAPS", False))


@cache
def pinnable() -> tuple[str, ...]:
    """Lists the forms that a pin may name: those that need to know nothing of a table's `ids`."""
    return tuple(key for key in chosen() if IDS not in facts_of_tables(key))


@cache
def zero_of_tables(key: str) -> int:
    """Returns what of a table is split where a form is chosen for it (`TABLE_ZERO`)."""
    return int(getattr(_FILES.load(key), "TABLE_ZERO", 0))


@cache
def has_owners() -> tuple[str, ...]:
    """Lists the exact forms under which each parameter has one owner, who has it whole (`OWNERS`):
    optimizers that look at whole parameters may step parts of a stage under these."""
    return tuple(
        key for key in chosen() if is_exact(key) and getattr(_FILES.load(key), "OWNERS", False)
    )


@cache
def takes_rows(key: str) -> bool:
    """Tells whether a form takes stores that keep rows of tables, and bring those that are asked
    for (`ROW_STORES`)."""
    return bool(getattr(_FILES.load(key), "ROW_STORES", False))


@cache
def is_for_stages(key: str) -> bool:
    """Tells whether a form is tried for whole stages, and not only named for single parameters."""
    return bool(getattr(_FILES.load(key), "SEARCHED", True))


@cache
def takes_copies(key: str, zero: int) -> bool:
    """Tells whether a form sends and keeps the copies of parameters that blocks read itself
    (`COPIES`); else it has whole ones of the optimizer's (`forms.copies`)."""
    found = _FILES.load(key)
    return bool(found.copies(zero) if hasattr(found, "copies") else getattr(found, "COPIES", False))


def offers(key: str, parameters: Sequence[int]) -> Mapping[str, Sequence[Setting]]:
    """Returns the values of a form's settings that are worth trying in a stage whose parameters
    have so many bytes, each in the order in which to try them; what is left out is as its file
    says."""
    found = _FILES.load(key)
    if not hasattr(found, "offers"):
        return {}
    tried: Mapping[str, Sequence[Setting]] = found.offers(parameters)
    return tried


@cache
def suits(key: str, zero: int) -> bool:
    """Returns whether a form that plans may choose goes together with a level of `Stage.zero`."""
    stage = Stage(
        first="", last="", mesh={}, devices=(), batch_shares=(), zero=zero,  # type: ignore[arg-type]
        sync=FormChoice(form=key),
    )  # fmt: skip
    return not wrong_settings(stage)


def takes(stage: Stage, store: str) -> bool:
    """Tells whether the form of a stage takes parameters that are in a store."""
    if keeps_rows(store):
        return takes_rows(stage.sync_form) if stage.dp > 1 else stage.sync_form == USUAL_FORM
    return is_split(store) == takes_parts(stage.sync_form, level_of(stage))


def wrong_settings(stage: Stage) -> tuple[tuple[str, str], ...]:
    """Lists what is wrong with the settings of the form that a stage names, and what would be
    right, as its file says."""
    return () if stage.sync is None else tuple(_FILES.load(stage.sync.form).check(stage))


def wrong_parameters(
    plan: Plan, graph: Graph, index: int, view: Stage, paths: Sequence[str]
) -> Iterator[tuple[str, str]]:
    """Yields what is wrong with a form for some parameters of stage `index`, and what would be
    right, as its file says that may look at the model (`check_parameters`)."""
    key = view.sync.form if view.sync else view.sync_form
    found = _FILES.load(key) if key in _FILES.names else None
    if found is not None and hasattr(found, "check_parameters"):
        yield from found.check_parameters(plan, graph, index, view, paths)

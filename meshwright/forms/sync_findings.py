"""What is wrong with the forms of synchronisation and the stores that a plan names."""

from collections.abc import Iterator
from dataclasses import replace

from meshwright.forms.copied import NEAREST, lost_copies
from meshwright.forms.storage import is_split, keeps_rows
from meshwright.forms.storage import of_stage as store_findings
from meshwright.forms.sync import (
    chosen,
    exchange_of,
    folds,
    has_owners,
    level_of,
    store_of,
    takes,
    takes_rows,
    undone_by_norm,
    usual_store,
    wrong_settings,
)
from meshwright.forms.updates import UPDATES, Reach, is_known, spoken, update
from meshwright.ir.errors import PlanError
from meshwright.ir.extensions import nearest
from meshwright.ir.plan.finding import Finding
from meshwright.ir.plan.folded import folded, folds_of
from meshwright.ir.plan.parameters import views_of
from meshwright.ir.plan.plan import Plan, Stage
from meshwright.ir.precision import precision
from meshwright.ir.text.plain_text import SHOWN


def findings(plan: Plan) -> Iterator[Finding]:
    """Yields what is wrong with the forms that a plan's stages name."""
    scales = precision(plan.precision).scales_loss
    for index, stage in enumerate(plan.stages):
        for where, view in zip(("", *stage.by_parameter), views_of(stage), strict=True):
            of = f", parameters {where[:SHOWN]!r}" if where else ""
            stepped = stage.by_parameter[where].update if where else ""
            if stepped and stepped not in UPDATES:
                message = f"stage {index}{of}: {stepped[:SHOWN]!r} is no optimizer"
                near = nearest(stepped[:SHOWN], UPDATES)
                yield Finding("by_parameter", message, f"update {near}")
                continue
            if view.sync is not None and view.dp > 1 and scales:
                message = (
                    f"stage {index}{of}: {plan.precision} leaves steps out that overflow, and "
                )
                message += f"{view.sync_form} takes all"
                yield Finding("sync", message, "no sync, or precision bf16")
            if plan.max_grad_norm and view.dp > 1 and (near := undone_by_norm(view.sync_form)):
                message = f"stage {index}{of}: gradients are clipped to a norm, so {view.sync_form}"
                yield Finding("sync", f"{message} lets none of them be late", near, "warning")
            wrong = tuple(of_stage(view, stepped or plan.optimizer))
            for finding in wrong:
                yield replace(finding, message=f"stage {index}{of}: {finding.message}")
            if not wrong and (lost := lost_copies(exchange_of(view), precision(plan.precision))):
                yield Finding("sync", f"stage {index}{of}: {lost}", NEAREST)


def of_stage(stage: Stage, optimizer: str) -> Iterator[Finding]:
    """Yields what is wrong with the form and the store of a stage."""
    wrong = [*_sync_findings(stage, optimizer), *store_findings(stage)]
    yield from wrong
    if any(finding.severity == "error" for finding in wrong):
        return
    torn = list(_torn(stage, optimizer))
    if not torn and folds(stage):
        torn = list(_torn(folded(stage, folds_of(stage.model)[-1]), optimizer))
    yield from torn


def _torn(stage: Stage, optimizer: str) -> Iterator[Finding]:
    """What does not go together in a stage."""
    store, form = store_of(stage), stage.sync_form
    if not takes(stage, store):
        if keeps_rows(store):
            forms = " or ".join([key for key in chosen() if takes_rows(key)])
            message = f"store {store} has rows of tables, and {form} takes none from it"
            yield Finding("store", message, f"sync {forms}, or no replicas")
            return
        split = is_split(store)
        what = "of which a rank has its part" if split else "that every rank has whole"
        message = f"store {store} is of parameters {what}, and {form} takes others"
        near = usual_store(form, level_of(stage))
        yield Finding(
            "store", message, f"store {near}, or none" if stage.store else f"store {near}"
        )
        return
    try:
        made = exchange_of(stage)
    except PlanError as error:
        yield Finding("store" if stage.store else "sync", str(error), "no store, no sync")
        return
    reach = update(optimizer).reach if is_known(optimizer) else Reach.ELEMENT
    apart = stage.dp > 1 and made.is_split("optimizer")
    # Where blocks are cut only shapes tell: `forms.stepping`.
    parts = reach in (Reach.ELEMENT, Reach.BLOCK)
    if apart and not (parts or (reach is Reach.PARAMETER and made.owns_whole)):
        message = (
            f"under {form} each rank steps its part of a parameter, and a step of "
            f"{spoken(optimizer)} depends on {reach.value}"
        )
        whole = reach is Reach.PARAMETER and has_owners()
        near = f"sync {whole[0]} and zero 1, " if whole else ""
        near += f"no sync and zero 0, or an optimizer that looks at {Reach.ELEMENT.value}"
        yield Finding("sync", message, near)


def _sync_findings(stage: Stage, optimizer: str) -> Iterator[Finding]:
    if stage.sync is None:
        return
    key = stage.sync.form[:SHOWN]
    if key not in chosen():
        message = f"{key!r} is no form of synchronisation to choose"
        yield Finding("sync", message, f"{nearest(key, chosen())}, or no sync")
        return
    wrong = wrong_settings(stage)
    for message, near in wrong:
        yield Finding("sync", message, near)
    if stage.dp == 1:
        yield Finding("sync", f"sync {key} has no effect without replicas", "no sync", "warning")
    elif not wrong and _updates_buckets(stage) and is_known(optimizer):
        if (reach := update(optimizer).reach) is Reach.GROUP:
            message = (
                f"sync {key} steps bucket after bucket, {spoken(optimizer)} looks at {reach.value}"
            )
            yield Finding("sync", message, "no sync")


def _updates_buckets(stage: Stage) -> bool:
    """Whether parameters are stepped as their gradients come, some before others."""
    return any(send.what == "gradients" for send in exchange_of(stage).late)


def check(plan: Plan) -> None:
    """PlanError with the first error that `findings` has."""
    for finding in findings(plan):
        if finding.severity == "error":
            raise PlanError(str(finding))

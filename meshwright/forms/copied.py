"""What a form does where blocks read copies of parameters, in another dtype than is stepped: the
same table, with copies in it. Bytes of units stay those of what the optimizer steps."""

from dataclasses import replace
from functools import cache

from meshwright.forms.exchange import Exchange
from meshwright.forms.exchange_rows import Event, Hold, HostCopy, Rewrite, Row, Send
from meshwright.forms.folding import folded_views
from meshwright.forms.sync import exchange_of, has_some_rows, takes_copies
from meshwright.ir.errors import PlanError
from meshwright.ir.layout.conversions import Primitive
from meshwright.ir.plan.plan import Plan
from meshwright.ir.precision import Precision, precision

NEAREST = "zero 1, or a precision without copies"


def lost_copies(exchange: Exchange, numbers: Precision) -> str:
    """Says how the table of a form forbids the copies that blocks read; "" if it does not."""
    if not numbers.copied or takes_copies(exchange.form, int(exchange.is_split("optimizer"))):
        return ""
    some = has_some_rows(exchange.form) or bool(exchange.row_copies)
    if not exchange.is_split("parameters") or some:
        return ""
    held = f"{exchange.form} has parts of parameters and knows of no copies"
    return f"blocks read copies of parameters, and {held}"


@cache
def copied(exchange: Exchange, numbers: Precision) -> Exchange:
    """Returns the table of a form under a precision: the same where blocks read no copies. A form
    that takes copies itself sends these in place of parameters, and sums of gradients in a dtype of
    theirs; under others copies are cast from whole parameters."""
    share, summed = numbers.copied, numbers.summed
    if not share:
        return exchange
    if takes_copies(exchange.form, int(exchange.is_split("optimizer"))):
        rows = tuple(_sent_as_copies(row, share, summed) for row in exchange.rows)
        if exchange.has_as_read:
            rows = tuple(_brought_as_copies(row, share) for row in rows)
        return replace(exchange, rows=rows, copied=share, summed=summed)
    if lost := lost_copies(exchange, numbers):
        raise PlanError(f"{lost}; nearest is {NEAREST}")
    if "parameters" in exchange.on_host and not exchange.row_copies:
        rows = tuple(_brought_as_copies(row, share) for row in exchange.rows)
        return replace(exchange, rows=rows, copied=share, copies_apart=True)
    cast = Rewrite(what="parameters", unit="bucket", at=Event.UPDATED, moved=1.0 + share)
    return replace(exchange, rows=(*exchange.rows, cast), copied=share, copies_apart=True)


def check_copies(plan: Plan) -> None:
    """PlanError where blocks read copies of parameters, and a form of the plan has none."""
    numbers = precision(plan.precision)
    for stage in plan.stages:
        for view in folded_views(stage):
            copied(exchange_of(view), numbers)


def loses_copies(plan: Plan) -> bool:
    """Tells whether blocks read copies of parameters, and a form or store of the plan has none."""
    try:
        check_copies(plan)
    except PlanError:
        return True
    return False


def _brought_as_copies(row: Row, share: float) -> Row:
    if isinstance(row, HostCopy) and (row.to == "device" or row.every):
        return replace(row, times=share)
    return row


def _sent_as_copies(row: Row, share: float, summed: float) -> Row:
    if isinstance(row, Send) and row.what == "gradients":
        return replace(row, times=summed)
    gathers = isinstance(row, Send) and row.primitive is Primitive.ALL_GATHER
    if isinstance(row, Send) and gathers and row.what == "parameters" and row.unit == "bucket":
        return replace(row, times=share)
    if isinstance(row, Hold) and row.kind == "communication":
        return replace(row, times=share if row.since is Event.UPDATED else summed)
    return row

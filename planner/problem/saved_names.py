"""What a plan does with the values that its layers' backward needs, in one word."""

from meshwright.forms.retention import names_of
from meshwright.ir.plan.plan import Plan


def saved_name(plan: Plan) -> str:
    """The form that was chosen (`forms.retention`), first of all one that moves, else `none`."""
    return next(iter(names_of(plan)), "none")

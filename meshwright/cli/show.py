"""`meshwright show`: a plan as tables."""

from meshwright.arguments.options import Json, PlanFile
from meshwright.ir.plan import plan_io
from meshwright.ir.plan.show import render
from meshwright.ir.text.terminal import Terminal

EXAMPLES = ("meshwright show plan.json",)


def command(plan_file: PlanFile, as_json: Json = False) -> None:
    """Print a plan as tables."""
    plan, out = plan_io.load(plan_file), Terminal()
    if as_json:
        out.print_json(plan_io.dumps(plan))
    else:
        out.print(render(plan))

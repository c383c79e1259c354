"""`meshwright schema`: the JSON Schema of plan files."""

import json

from meshwright.ir.plan import plan_io
from meshwright.ir.text.terminal import Terminal

EXAMPLES = ("meshwright schema > plan.schema.json",)


def command() -> None:
    """Print the JSON Schema of plan files."""
    Terminal().print_json(json.dumps(plan_io.json_schema()))

"""Whether this machine can compile what a plan wants compiled: said when a job starts."""

import os
from importlib.util import find_spec
from shutil import which

from meshwright.ir.errors import MeshwrightError
from meshwright.ir.plan.plan import Plan

_CXX = "g++"
"""What torch calls on a CPU if CXX names nothing else."""


def check_compiler(plan: Plan, kind: str) -> None:
    """`kind`: of the device, cpu or cuda. MeshwrightError names what torch.compile lacks here."""
    stages = [i for i, stage in enumerate(plan.stages) if stage.compile]
    if not stages or not (lacks := _lacking(kind)):
        return
    raise MeshwrightError(
        f"stage {stages[0]} is to be compiled (compile true), and torch.compile on {kind} needs "
        f"{lacks}, which is not here; install it, or set compile false in the plan"
    )


def _lacking(kind: str) -> str:
    if kind == "cuda":
        return "" if find_spec("triton") else "triton"
    named = os.environ.get("CXX", _CXX)
    return "" if which(named) else f"the C++ compiler {named!r}"

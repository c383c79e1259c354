"""A plan that leaves less room than predictions of memory are off says so."""

from dataclasses import replace

import pytest

from meshwright.ir.plan.plan import Plan
from meshwright.planner.pins.decision_text import parse_constraint
from meshwright.planner.pins.decisions import MemoryCap
from meshwright.planner.search.search import search_problem
from tests.planner.problems import cluster, mlp, problem

ASKED = ("dp=1", "pp=1", "recompute=none", "num_microbatches=1")


def found(room_bytes: int | None, *more: str) -> Plan:
    """The plan of one device that has so much memory."""
    machine = cluster(1)
    if room_bytes is not None:
        device = machine.device_types[0]
        full = replace(device, reserved_bytes=device.memory_bytes - room_bytes)
        machine = replace(machine, device_types=(full,))
    return search_problem(problem(mlp(), machine, constraints=(*ASKED, *more)), "ilp")


def said(plan: Plan) -> list[str]:
    return [note for note in plan.notes if "devices' memory" in note]


@pytest.fixture(scope="module")
def needed_bytes() -> int:
    plan = found(None)
    assert plan.predicted and not said(plan)
    return plan.predicted.peak_bytes


def test_what_hardly_fits_says_so_and_which_pin_keeps_room(needed_bytes: int) -> None:
    (note,) = said(found(round(needed_bytes / 0.96)))
    assert note.startswith("stage 0 fills 96.0% of its devices' memory")
    pin = note.split("the pin '")[1].split("'")[0]
    cap = parse_constraint(pin)
    assert isinstance(cap, MemoryCap)
    assert cap.nbytes == pytest.approx(0.9 * needed_bytes / 0.96, rel=5e-3)


def test_what_leaves_room_says_nothing(needed_bytes: int) -> None:
    assert not said(found(round(needed_bytes / 0.94)))


def test_who_has_said_how_much_may_be_used_is_not_told(needed_bytes: int) -> None:
    assert not said(found(None, f"memory<={needed_bytes}B"))

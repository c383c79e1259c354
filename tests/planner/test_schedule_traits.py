"""What is known of a schedule comes from its table: a file of another name gets the same plans and
bounds, and no module but its own compares its name."""

import ast
from pathlib import Path
from subprocess import CompletedProcess

import pytest

import meshwright
from meshwright.ir.errors import PlanError
from meshwright.ir.plan.schedule import Action, Schedule, Work, in_flight, parse_schedule
from meshwright.planner.problem import schedule_tools
from meshwright.planner.problem.schedule_tools import (
    MADE,
    SCHEDULES,
    USUAL,
    make_schedule,
    most_held,
    stages_per_rank,
    traits,
    twin,
)
from meshwright.planner.search.search import search_problem
from meshwright.testing.fresh import python
from tests.planner.chains import problem

COPIES = {
    "riverbed": "zero_bubble", "delta": "zbv", "marsh": "dapple_pb",
    "brook": "full_critical_path_1f1b",
}  # fmt: skip
COMPARE = """
from meshwright.planner.bounds import frames
from meshwright.planner.search.search import search_problem
from tests.planner.chains import problem
frames.UNITS = 0  # bounds as on large clusters, where not all is gone through
for pair in {pairs}:
    for pins in (("num_microbatches=1",), ("num_microbatches=4", "memory<=1GB")):
        plans = [search_problem(problem(8, 4, 4, f"schedule={{n}}", "pp=4", *pins)) for n in pair]
        for plan in plans:
            assert plan.evidence.gap is not None, pair
            assert plan.evidence.gap >= 0 and plan.evidence.bound_s <= plan.predicted.step_s, pair
        one, two = plans
        assert one.predicted.step_s == two.predicted.step_s, pair
        assert one.evidence.bound_s == two.evidence.bound_s, pair
        assert one.schedule.rows == two.schedule.rows and two.schedule.name == pair[1]
print("equal")
"""


def in_folder(folder: Path, text: str) -> CompletedProcess[str]:
    return python("-c", text, MESHWRIGHT_SCHEDULES=str(folder))


def test_a_copy_under_another_name_is_the_same(tmp_path: Path) -> None:
    own = Path(schedule_tools.schedules.__path__[0])
    for copy, name in COPIES.items():
        (tmp_path / f"{copy}.py").write_text((own / f"{name}.py").read_text())
    pairs = [(name, copy) for copy, name in COPIES.items()]
    done = in_folder(tmp_path, COMPARE.format(pairs=pairs))
    assert done.stdout.strip() == "equal", done.stderr[-2000:]


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    text = "from meshwright.planner.problem import schedule_tools"
    assert "MESHWRIGHT_SCHEDULES" in in_folder(tmp_path / "none", text).stderr


def test_the_name_of_made_schedules_is_taken(tmp_path: Path) -> None:
    (tmp_path / f"{MADE}.py").write_text("STAGES_PER_RANK = (1,)\n")
    text = f"from meshwright.planner.problem.schedule_tools import traits; traits({MADE!r})"
    assert "give the file another name" in in_folder(tmp_path, text).stderr


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("pins", [("num_microbatches=1",), ("num_microbatches=4", "memory<=1GB")])
def test_no_step_is_below_its_bound(name: str, pins: tuple[str, ...]) -> None:
    plan = search_problem(problem(8, 4, 4, f"schedule={name}", "pp=4", *pins))
    assert plan.evidence and plan.predicted and plan.schedule.name == name
    assert plan.evidence.gap is not None and plan.evidence.gap >= 0
    assert plan.evidence.bound_s <= plan.predicted.step_s


def test_traits_of_the_files() -> None:
    halves = {name for name in SCHEDULES if traits(name).halves}
    early = {name for name in SCHEDULES if traits(name).early}
    assert halves == {"zero_bubble", "zbv", "dual_pipe_v"}
    assert early == {
        "pre_recompute_1f1b", "last_no_recompute_1f1b", "full_critical_path_1f1b"
    }  # fmt: skip
    assert {traits(name).kept for name in early} == {0, 1}
    assert [name for name in SCHEDULES if twin(name, USUAL)] == ["dapple_pa", USUAL]


def test_what_many_microbatches_hold() -> None:
    """Read off a table of few where that is enough."""
    for name in SCHEDULES:
        if 1 in stages_per_rank(name):
            assert most_held(name, 3, 40) == in_flight(make_schedule(name, 3, 40, 3)), name
    assert in_flight(parse_schedule("x", ("0F0 0F1 0I0 0W0 0B1",))) == (2,)


def test_a_table_that_does_more_than_small_ones_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bounds would not hold for it."""

    class Sly:
        STAGES_PER_RANK = (1,)

        @staticmethod
        def schedule(num_stages: int, num_microbatches: int, num_ranks: int) -> Schedule:
            kinds = (Work.FORWARD, Work.BACKWARD)
            if num_microbatches == 64:
                kinds = (Work.FORWARD, Work.BACKWARD_INPUT, Work.BACKWARD_WEIGHT)
            rows = [
                tuple(Action(stage, kind, m) for kind in kinds for m in range(num_microbatches))
                for stage in range(num_stages)
            ]
            return Schedule("sly", tuple(rows))

    monkeypatch.setattr(schedule_tools, "_module", lambda name: Sly)
    assert make_schedule("sly", 2, 32, 2).num_microbatches == 32
    with pytest.raises(PlanError, match="takes backwards in halves with 2 ranks and 64"):
        make_schedule("sly", 2, 64, 2)


def _named(tree: ast.AST) -> set[str]:
    """Names of schedules that something is compared with, or looked up by."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare | ast.Set | ast.Dict | ast.MatchValue):
            for part in ast.walk(node):
                if isinstance(part, ast.Constant) and part.value in SCHEDULES:
                    found.add(part.value)
    return found


def test_no_other_module_compares_a_schedules_name() -> None:
    root = Path(meshwright.__file__).parent.parent
    paths = [
        path
        for folder in ("ir", "costmodel", "planner", "codegen", "runtime")
        for path in (root / folder).rglob("*.py")
        if path.parent.name != "schedules"
    ]
    assert len(paths) > 200
    said = {str(p): named for p in paths if (named := _named(ast.parse(p.read_text())))}
    assert not said

"""Each form of retention against what really runs; a file of a user's own goes all the way."""

import ast
import gc
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from subprocess import CompletedProcess
from uuid import uuid4

import pytest

from meshwright.costmodel.block.keeping import effect
from meshwright.forms.retaining import AS_IT_IS, NOTHING, Footprint
from meshwright.forms.retention import RETENTIONS, Retention, fate_of, findings, retention
from meshwright.forms.retention.offload import HostMemory
from meshwright.ir.errors import PlanError
from meshwright.ir.plan.keeping import makers
from meshwright.ir.plan.plan import Plan
from meshwright.planner.problem.predict import predict_plan
from meshwright.planner.problem.problem import make_problem
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.testing.fresh import python
from meshwright.testing.spawn import alone
from tests.form_files.policies import _makers, policy
from tests.form_files.small import Cluster, batches, difference, graph, model, plan_for

pytestmark = pytest.mark.filterwarnings("ignore:offload on cpu")


def with_form(name: str, ranks: int = 2) -> Plan:
    plan = plan_for("sgd", ranks)
    problem = make_problem(graph(), Cluster.local(ranks), precision="fp64", optimizer="sgd")
    saved = {b.pattern: policy(problem, b, name) for b in graph().blocks}
    saved = {pattern: said for pattern, said in saved.items() if said}
    assert saved
    return replace(plan, stages=tuple(replace(stage, saved=saved) for stage in plan.stages))


@pytest.mark.parametrize("name", RETENTIONS)
def test_it_equals_one_process(name: str) -> None:
    if not retention(name).exact:
        pytest.skip("it says that it is not exact")
    assert difference(with_form(name), lr=0.1) <= 1e-12


def _peak(plan: Plan) -> int:
    gc.disable()
    job = compile_job(model(), plan, graph=graph(), optimizer="sgd", lr=0.1, device="cpu")
    job.step(batches()[0])
    job.track_memory(batches()[0])
    assert job.tensor_memory is not None
    job.close()
    return job.tensor_memory.peak_bytes


@pytest.mark.parametrize("name", RETENTIONS)
def test_memory_is_what_is_tracked(name: str) -> None:
    plan = with_form(name, 1)
    problem = make_problem(graph(), Cluster.local(1), precision="fp64", optimizer="sgd")
    found = predict_plan(problem, plan).stages[0].memory.tensor_bytes
    assert found == pytest.approx(alone(_peak, plan), rel=0.08)


@pytest.mark.parametrize("name", RETENTIONS)
def test_bytes_and_seconds_are_those_of_its_makers(name: str) -> None:
    """Whatever a form gives up is what its makers made, and seconds are paid only for what runs
    again."""
    problem = make_problem(graph(), Cluster.preset("a100-40"), precision="fp64", optimizer="sgd")
    block = graph().blocks[1]
    said, form = policy(problem, block, name), retention(fate_of(name))
    found = _makers(problem, block)
    cost = effect(found, tuple(said.items()))
    named = {k for k in makers(graph(), block) if any(fnmatchcase(k, p) for p in said)}
    given_up = sum(n for key, n in found.walk.saved.items() if found.maker(key) in named)
    assert cost.remade_bytes == given_up * form.again
    assert cost.moved_bytes == given_up * form.moved
    assert (cost.again_s > 0) == (form.again and given_up > 0)
    assert given_up > 0


def test_an_unknown_one_is_named() -> None:
    with pytest.raises(PlanError, match="no retention 'ofload'; nearest is 'offload'"):
        retention("ofload")
    plan = with_form("offload")
    stage = replace(plan.stages[0], saved={"*": {"*": "ofload"}})
    (finding,) = findings(replace(plan, stages=(stage,)))
    assert "'ofload'" in finding.message and finding.nearest == "offload"


HALF = """
from meshwright.forms.retention import Retention

def choose(block, forward_s):
    way = block.fastest(sum(block.saved_bytes.values()) * 2 // 3)
    return way.keys if way else ()

RETENTION = Retention(fate="recompute", choose=choose)
"""
IN_TURNS = """
from collections import Counter
from meshwright.forms.retaining import NOTHING
from meshwright.forms.retention import Retention

SEEN = Counter()

def decide(block, maker):
    SEEN[block, maker] += 1  # another fate in each micro-batch
    return ("keep", "recompute", "offload")[SEEN[block, maker] % 3]

RETENTION = Retention(describe=lambda dtype: NOTHING, decide=decide)
"""
SMALLER = """
import torch
from meshwright.forms.retaining import AS_IT_IS, Footprint, RetentionRun
from meshwright.forms.retention import Retention

BYTES = {"float64": 8, "float32": 4}  # 2 are left; all are read, and 2 are written

def describe(dtype):
    size = BYTES.get(dtype)
    return Footprint(held=2 / size, copied=1 + 2 / size) if size else AS_IT_IS

class Smaller(RetentionRun):
    def __init__(self, device):
        self.device = device

    def produced(self, memories):
        for memory in memories:
            if memory.dtype in (torch.float32, torch.float64):
                memory.instead = memory.here.view(memory.dtype).bfloat16()
                memory.here = None

    def needed(self, memories):
        for memory in memories:
            if memory.here is None:
                memory.here = memory.instead.to(memory.dtype).view(torch.uint8)
                memory.instead = None

RETENTION = Retention(exact=False, describe=describe, build=Smaller)
"""
TURNED = """
from meshwright.forms.retaining import Footprint, RetentionRun
from meshwright.forms.retention import Retention

CALLS = []

class Turned(RetentionRun):  # bytes from the last to the first
    def __init__(self, device):
        self.device = device

    def produced(self, memories):
        CALLS.append(len(memories))
        for memory in memories:
            memory.instead, memory.here = memory.here.flip(0), None

    def needed(self, memories):
        for memory in memories:
            if memory.here is None:
                memory.here, memory.instead = memory.instead.flip(0), None

RETENTION = Retention(describe=lambda dtype: Footprint(copied=2.0), build=Turned)
"""
WHOLE_IN_TURNS = """
from collections import Counter
from meshwright.forms.retaining import NOTHING
from meshwright.forms.retention import Retention

SEEN = Counter()

def decide(block, maker):
    assert not maker  # the block is asked for as one
    SEEN[block] += 1
    return ("keep", "full")[SEEN[block] % 2]

RETENTION = Retention(unit="block", describe=lambda dtype: NOTHING, decide=decide)
"""
PATH = """
from pathlib import Path
from tests.form_files.small import search_and_run
found = search_and_run(
    Path({folder!r}), ("saved={name}", "dp=2", "num_microbatches=2"), optimizer="sgd"
)
plan = found["plan"]
assert {low} <= found["difference"] <= {high}, found["difference"]
print(sorted({{how for s in plan.stages for p in s.saved.values() for how in p.values()}}))
"""


def in_folder(folder: Path, text: str) -> CompletedProcess[str]:
    return python("-c", text, MESHWRIGHT_RETENTION=str(folder))


ROUNDING = (0.0, 1e-9)
FILES = {
    "chooses": (HALF, "recompute", ROUNDING),
    "decides": (IN_TURNS, "", ROUNDING),
    "decides on blocks": (WHOLE_IN_TURNS, "", ROUNDING),
    "turned": (TURNED, "", ROUNDING),
    "smaller": (SMALLER, "", (1e-7, 0.02)),  # it runs: numbers of 8 bits are not those of 53
}


def dropped(folder: Path, text: str) -> str:
    name = f"r{uuid4().hex[:8]}"
    (folder / f"{name}.py").write_text(text)
    return name


@pytest.mark.sampled
@pytest.mark.parametrize("file", FILES)
def test_a_file_of_any_name_goes_the_whole_way(file: str, tmp_path: Path) -> None:
    text, said, (low, high) = FILES[file]
    name = dropped(tmp_path, text)
    path = PATH.format(folder=str(tmp_path), name=name, low=low, high=high)
    done = in_folder(tmp_path, path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == str([said or name])


@pytest.mark.parametrize(("file", "passed"), [("turned", 3), ("smaller", 2)])
def test_tests_of_the_folder_hold_for_a_file_of_a_users_own(
    file: str, passed: int, tmp_path: Path
) -> None:
    """Its memory is what is tracked, its bytes those of its makers, and it is exact if it says so:
    the tests of this file, with one form more."""
    name = dropped(tmp_path, FILES[file][0])
    command = f"import pytest; pytest.main(['-q', '-n0', '-k', '{name}', {str(__file__)!r}])"
    done = in_folder(tmp_path, command)
    assert f"{passed} passed" in done.stdout and "failed" not in done.stdout, done.stdout[-3000:]


FREE = """
from meshwright.ir.cluster.cluster import Cluster
from meshwright.planner.problem.problem import make_problem
from meshwright.planner.problem.saved_modes import free_modes, policy_of
from tests.form_files.small import graph
asked = make_problem(graph(), Cluster.preset("a100-40"), precision="fp32", optimizer="sgd")
assert policy_of(asked, graph().blocks[1].pattern, {name!r})
print({name!r} in free_modes(asked))
"""


@pytest.mark.parametrize(("file", "free"), [("turned", True), ("smaller", False)])
def test_a_search_chooses_only_what_is_exact(file: str, free: bool, tmp_path: Path) -> None:
    name = dropped(tmp_path, FILES[file][0])
    done = in_folder(tmp_path, FREE.format(name=name))
    assert done.stdout.strip() == str(free), done.stderr[-3000:]


ODD_LAYERS = """
from meshwright.forms.retention import Retention

RETENTION = Retention(
    fate="full", share=lambda stages, first: [first] * (stages - 1) + [1.0], offered=False
)
"""
BY_STAGE = """
from pathlib import Path
from tests.form_files.small import search_and_run
pins = ("recompute={name}", "pp=2", "num_microbatches=2", "schedule=one_f_one_b")
found = search_and_run(Path({folder!r}), pins, optimizer="sgd")
assert found["difference"] <= 1e-9, found["difference"]
print([list(stage.recompute.values()) for stage in found["plan"].stages])
"""


def test_shares_of_layers_by_stage_are_one_file(tmp_path: Path) -> None:
    name = dropped(tmp_path, ODD_LAYERS)
    done = in_folder(tmp_path, BY_STAGE.format(folder=str(tmp_path), name=name))
    assert done.returncode == 0, done.stderr[-3000:]
    first, last = ast.literal_eval(done.stdout.strip())
    assert first and last and {*first, *last} == {"full"}


def _partly(dtype: str) -> Footprint:
    return AS_IT_IS if dtype == "int64" else NOTHING


@pytest.mark.parametrize(
    ("form", "said"),
    [
        (Retention(describe=_partly), "describe all of them alike"),
        (Retention(describe=lambda dtype: NOTHING, build=HostMemory), "leave it out"),
        (Retention(describe=lambda dtype: Footprint(held=0.5)), "needs `build`"),
        (Retention(share=lambda stages, first: []), "`fate` names it"),
        (Retention(unit="block"), "take unit 'op'"),
    ],
)
def test_halves_that_do_not_go_together_are_refused(form: Retention, said: str) -> None:
    assert said in next(form.wrong())


def test_a_footprint_is_of_figures() -> None:
    with pytest.raises(PlanError, match=r"held must be 0 or more, such as 0\.5"):
        Footprint(held=-0.5)


def test_a_block_as_one_is_not_said_of_single_ops() -> None:
    plan = with_form("full")
    assert not list(findings(plan))
    stage = replace(plan.stages[0], saved={"*": {"*up*": "full"}})
    (finding,) = findings(replace(plan, stages=(stage,)))
    assert "'full' is said of some ops" in finding.message
    assert finding.nearest == '{"*": "full"}'


def test_recompute_is_short_for_a_form() -> None:
    """`recompute: full` and `saved: full` cost the same, and compute the same bits."""
    plan = with_form("full")
    blocks = [b.pattern for b in graph().blocks]
    stage = replace(plan.stages[0], saved={}, recompute=dict.fromkeys(blocks, "full"))
    short = replace(plan, stages=(stage,))
    problem = make_problem(graph(), Cluster.local(2), precision="fp64", optimizer="sgd")
    first, second = (predict_plan(problem, one) for one in (plan, short))
    assert first.step_s == second.step_s and first.peak_bytes == second.peak_bytes
    assert difference(short, lr=0.1) == difference(plan, lr=0.1)


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    done = in_folder(tmp_path / "none", "import meshwright.forms.retention")
    assert "MESHWRIGHT_RETENTION" in done.stderr


def test_a_block_as_one_cannot_be_held_as_single_ops_are(tmp_path: Path) -> None:
    """Who decides on a form for what ops make is told so, and nothing is simply kept."""
    text = WHOLE_IN_TURNS.replace('("keep", "full")', '("offload", "full")')
    (tmp_path / "mine_odd.py").write_text(text)
    script = f"""
from pathlib import Path
from tests.form_files.small import search_and_run
search_and_run(Path({str(tmp_path)!r}), ("saved=mine_odd", "dp=2"), optimizer="sgd")
"""
    done = in_folder(tmp_path, script)
    assert done.returncode and "decides for all of" in done.stderr, done.stderr[-2000:]
    assert "nearest is 'full', or 'keep'" in done.stderr

"""Each form of retention against what really runs; a file of a user's own goes all the way."""

import gc
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from subprocess import CompletedProcess
from uuid import uuid4

import pytest

from meshwright.costmodel.block.keeping import Makers, effect
from meshwright.costmodel.cost_cache import BlockSpot
from meshwright.forms.retention import RETENTIONS, fate_of, retention, unknown
from meshwright.ir.errors import PlanError
from meshwright.ir.graph.graph import Block
from meshwright.ir.plan.keeping import makers
from meshwright.ir.plan.plan import Plan
from meshwright.planner.inside.saved_choice import SavedChoice
from meshwright.planner.problem.predict import predict_plan
from meshwright.planner.problem.problem import Problem, make_problem
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.testing.fresh import python
from tests.form_files.small import Cluster, batches, difference, graph, model, plan_for
from tests.spawn import alone

pytestmark = pytest.mark.filterwarnings("ignore:offload on cpu")


def policy(problem: Problem, block: Block, name: str) -> dict[str, str]:
    """What a form says of the ops of a block, as if that took ten times as long: on so small
    tensors every op takes a launch, and nothing is cheap."""
    form, found = retention(name), _makers(problem, block)
    if form.choose is None:
        return {"*": fate_of(name)}
    keys = form.choose(SavedChoice(found), 10 * found.walk.clock.forward_s)
    return dict.fromkeys(keys, fate_of(name))


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


def _makers(problem: Problem, block: Block) -> Makers:
    layout = next(x for x in problem.layouts(()) if x.pattern == block.pattern)
    device = problem.tables.device_names[0]
    return problem.tables.blocks.makers(block, layout, BlockSpot(4, 1, (), device, (), ()))


def test_an_unknown_one_is_named() -> None:
    with pytest.raises(PlanError, match="no retention 'ofload'; nearest is 'offload'"):
        retention("ofload")
    plan = with_form("offload")
    stage = replace(plan.stages[0], saved={"*": {"*": "ofload"}})
    (finding,) = unknown(replace(plan, stages=(stage,)))
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
from meshwright.forms.retention import Retention

SEEN = Counter()

def decide(block, maker):
    SEEN[block, maker] += 1  # another fate in each micro-batch
    return ("keep", "recompute", "offload")[SEEN[block, maker] % 3]

RETENTION = Retention(again=True, decide=decide)
"""
PATH = """
from pathlib import Path
from tests.form_files.small import search_and_run
found = search_and_run(
    Path({folder!r}), ("saved={name}", "dp=2", "num_microbatches=2"), optimizer="sgd"
)
plan = found["plan"]
assert found["difference"] <= 1e-9, found["difference"]
print(sorted({{how for s in plan.stages for p in s.saved.values() for how in p.values()}}))
"""


def in_folder(folder: Path, text: str) -> CompletedProcess[str]:
    return python("-c", text, MESHWRIGHT_RETENTION=str(folder))


@pytest.mark.parametrize(("text", "said"), [(HALF, "recompute"), (IN_TURNS, "")])
def test_a_file_of_any_name_goes_the_whole_way(text: str, said: str, tmp_path: Path) -> None:
    name = f"r{uuid4().hex[:8]}"
    (tmp_path / f"{name}.py").write_text(text)
    done = in_folder(tmp_path, PATH.format(folder=str(tmp_path), name=name))
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == str([said or name])


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    done = in_folder(tmp_path / "none", "import meshwright.forms.retention")
    assert "MESHWRIGHT_RETENTION" in done.stderr

"""Tables of forms of synchronisation: their rules, and the models that read them."""

import ast
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from meshwright.costmodel.comm.comm import Level
from meshwright.costmodel.comm.volume import _data
from meshwright.costmodel.estimate import estimate_all
from meshwright.costmodel.memory.memory_group import MemoryGroup
from meshwright.costmodel.memory.stage_memory import BlockMemory, StageMemory
from meshwright.costmodel.simulate.compiled_schedule import LAST, B, F, I, W
from meshwright.costmodel.stage.buckets import Bucket
from meshwright.costmodel.stage.form_group import FormGroup
from meshwright.costmodel.stage.program import Do, play
from meshwright.costmodel.stage.replica_lines import ReplicaLines
from meshwright.costmodel.stage.sync import Sync
from meshwright.forms import sync as forms
from meshwright.forms.exchange import Exchange
from meshwright.forms.exchange_rows import Event, Hold, Rewrite, Row, Send
from meshwright.forms.exchange_rules import checked
from meshwright.forms.sync import exchange
from meshwright.ir.errors import PlanError
from meshwright.ir.extensions import Files
from meshwright.ir.layout.conversions import Primitive
from meshwright.ir.plan import plan as plans
from meshwright.planner.across.choice_space import ChoiceSpace
from meshwright.planner.across.run_costs import RunCosts
from meshwright.planner.across.stage_tables import StageTables
from meshwright.planner.bounds.rates import BlockRates
from meshwright.planner.problem import candidates, space
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import Problem
from meshwright.planner.problem.space import Mesh
from meshwright.testing.fresh import python
from tests.costmodel.stage.small_stage import BLOCK, LINK, NO_OVERHEADS, TWO
from tests.planner.problems import cluster, mlp, problem

ROOT = Path(__file__).parent.parent.parent
ALWAYS = {"since": Event.BEGIN, "until": Event.NEXT_BEGIN}
STATE = (Hold(kind="parameters", whole=1, **ALWAYS), Hold(kind="optimizer", whole=1, **ALWAYS))
PART = (Hold(kind="parameters", part=1, **ALWAYS), Hold(kind="optimizer", part=1, **ALWAYS))
SUM = Send(
    what="gradients", primitive=Primitive.ALL_REDUCE, axis="dp", unit="bucket",
    at=Event.AFTER_LAST, until=Event.END,
)  # fmt: skip
GATHER = Send(
    what="parameters", primitive=Primitive.ALL_GATHER, axis="dp_shard", unit="block",
    at=Event.BEFORE_FORWARD, until=Event.BEFORE_FORWARD,
)  # fmt: skip


def described() -> list[str]:
    """Forms that say what they cost; other files of the folder are what they share."""
    folder = Path(forms.__file__).parent
    return sorted(p.stem for p in folder.glob("*.py") if "\ndef describe(" in p.read_text())


@pytest.mark.parametrize("replicas", [1, 2, 6])
@pytest.mark.parametrize("name", described())
def test_each_form_is_whole(name: str, replicas: int) -> None:
    """Whatever is held ends, whatever is sent arrives before it is used, and the three kinds of
    state have a place over the whole step."""
    table = exchange(name, replicas)
    for row in table.rows:
        if isinstance(row, Hold):
            assert row.since <= row.until and row.whole + row.part > 0
        elif isinstance(row, Send):
            latest = Event.END if row.what == "gradients" else row.at
            assert row.at <= row.until <= (Event.NEXT_FORWARD if row.is_late else latest)
    for kind in ("parameters", "optimizer"):
        (state,) = [h for h in table.holds if h.kind == kind and h.unit == "stage"]
        assert (state.since, state.until) == (Event.BEGIN, Event.NEXT_BEGIN)
    whole = table.begun[0] + table.sums_into_zeros + table.begun[1]
    assert whole == 1, "gradients are either whole or a part, from one event on"
    assert exchange(name, replicas) is table


def test_the_folder_has_the_usual_four() -> None:
    assert {"zero0", "zero1", "zero2", "zero3"} <= set(described())
    splits = {
        f"zero{n}": {k for k in ("parameters", "gradients", "optimizer")
                     if exchange(f"zero{n}", 4).is_split(k)}  # type: ignore[arg-type]
        for n in range(4)
    }  # fmt: skip
    assert splits == {
        "zero0": set(), "zero1": {"optimizer"}, "zero2": {"optimizer", "gradients"},
        "zero3": {"optimizer", "gradients", "parameters"},
    }  # fmt: skip
    with pytest.raises(PlanError, match="nearest is 'zero2'"):
        exchange("zero22", 2)
    with pytest.raises(PlanError, match="no form of synchronisation 'running'; nearest is '"):
        exchange("running", 2)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ((*STATE, replace(SUM, until=Event.BEGIN)), "ends before it begins"),
        ((*STATE, replace(SUM, until=Event.UPDATED)), "the optimizer needs gradients"),
        ((*STATE, replace(SUM, at=Event.UPDATED, until=Event.UPDATED)), "AFTER_LAST, END"),
        ((*STATE, replace(SUM, axis="dp_shard")), "replicas must agree"),
        ((*STATE, SUM, replace(SUM, at=Event.AFTER_BACKWARD, packs="whole", adds=True)), "one mes"),
        ((*STATE, replace(SUM, at=Event.AFTER_BACKWARD)), "packed, and added up"),
        ((*PART, SUM, GATHER), "before forward and backward"),
        ((STATE[0], PART[1], SUM), "reach the others"),
        ((*STATE, SUM, replace(GATHER, unit="bucket")), "its own parameters go"),
        ((*STATE, SUM, replace(GATHER, until=Event.UPDATED)), "needed at once"),
        ((Hold(kind="parameters", **ALWAYS),), "holds nothing"),
        (
            (Rewrite(what="gradients", unit="bucket", at=Event.BEGIN, moved=1.0),),
            "at one of LAST_F",
        ),
        ((Rewrite(what="gradients", unit="stage", at=Event.END, moved=1.0),), "a price on buckets"),
        ((Rewrite(what="gradients", unit="bucket", at=Event.AFTER_LAST, moved=1.0),), "at END"),
        ((*STATE, SUM, Hold(kind="gradients", whole=1, share="rows", **ALWAYS)), "has no rows"),
        ((*STATE, replace(SUM, lag=-1)), "lag 0 or more"),
        ((*STATE, replace(SUM, lag=1, unit="stage")), "goes in buckets"),
        ((*STATE, replace(SUM, lag=1, at=Event.AFTER_BACKWARD)), "once in its own"),
        ((*STATE, replace(SUM, lag=2, adds=True)), "neither added up"),
        ((*STATE, replace(SUM, share="rows")), "no rows above 0; it has nothing"),
        ((Hold(kind="kept", since=Event.END, until=Event.NEXT_BEGIN, whole=1),), "from BEGIN to"),
    ],
)
def test_tables_that_break_a_rule_are_refused(rows: tuple[Row, ...], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        checked(Exchange(rows))


def test_what_is_waited_for_steps_later_is_none_of_this_steps() -> None:
    late = replace(SUM, at=Event.UPDATED, until=Event.NEXT_FORWARD, what="parameters", lag=2)
    part = replace(SUM, lag=1, until=Event.BEGIN, of_part=True, share="rows")
    kept = Hold(kind="kept", part=1, **ALWAYS)
    table = checked(Exchange((*STATE, SUM, late, part, kept), stated={"rows": 0.25}))
    assert table.lagging == (late, part) and table.last_backward == (SUM,)
    assert not table.late and not table.published and not late.is_late
    assert table.under_way == (3.0, 0.25) and table.kept == (0, 1)
    assert table.sent(part, 400) == 100 and table.sent(SUM, 400) == 400


def synced(table: Exchange, *, prefetch: int = 0, replicas: tuple[Level, ...] = TWO) -> Sync:
    """Three blocks of 2 s forward and 4 s backward, 200,000 bytes each, over 2 x 2 ranks."""
    four = (Level(4, LINK),)
    lines = ReplicaLines(dp=four, shard=TWO, copies=replicas, ranks=4, shards=2)
    return Sync(
        groups=(FormGroup(table, tuple(Bucket(i, 200_000, 1) for i in (2, 1, 0)), (200_000,) * 3,
                          lines=lines),),
        prefetch=prefetch, blocks=(BLOCK,) * 3,
        prelude_s=0.0, overheads=NO_OVERHEADS,
    )  # fmt: skip


def test_no_sends_take_no_time() -> None:
    made = synced(Exchange(STATE), prefetch=2)
    programs = made.programs()
    assert not any(programs[kind].uses_channel for kind in (F, B, I, W, B + LAST, W + LAST))
    assert [play(programs[k].steps)[0] for k in (F, B, B + LAST)] == [6.0, 12.0, 12.0]
    assert [step.do for step in made.finish(())] == [Do.WAIT_ALL]
    assert not list(made.publish()) and not list(_data(made, 8))


def test_gathers_before_forward_only() -> None:
    """A table that no form has: parameters stay whole until the backward is over."""
    made = synced(Exchange((*STATE, SUM, GATHER)))
    programs = made.programs()
    # An all-gather of 200,000 bytes over two ranks at 100 kB/s.
    assert play(programs[F].steps)[0] == pytest.approx(3 * (1.0 + 2.0))
    assert play(programs[B].steps)[0] == 12.0
    ahead = replace(GATHER, ahead=True)
    made = synced(Exchange((*STATE, SUM, ahead)), prefetch=1)
    assert play(made.programs()[F].steps)[0] == pytest.approx(1.0 + 3 * 2.0)


RING = {"gradients dp": 0.0, "gradients dp_shard": 0.0, "gradients dp_replicate": 0.0,
        "parameters dp_shard": 0.0}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "sent"),
    [
        # Ring: 2 (n - 1) / n of what is all-reduced, (n - 1) / n of what is gathered or scattered.
        ("zero0", {"gradients dp": 1.5 * 600_000}),
        ("zero1", {"gradients dp_shard": 300_000, "gradients dp_replicate": 300_000,
                   "parameters dp_shard": 300_000}),
        ("zero2", {"gradients dp_shard": 5 * 300_000, "gradients dp_replicate": 300_000,
                   "parameters dp_shard": 300_000}),
        ("zero3", {"gradients dp_shard": 5 * 300_000, "gradients dp_replicate": 300_000,
                   "parameters dp_shard": 10 * 300_000}),
    ],
)  # fmt: skip
def test_traffic_of_five_micro_batches(name: str, sent: dict[str, float]) -> None:
    found: Counter[str] = Counter()
    for one in _data(synced(exchange(name, 4)), 5):
        found[f"{one.purpose} {one.axis}"] += one.nbytes  # type: ignore[assignment]
    assert found == pytest.approx(sent)


def test_memory_of_a_table_by_hand() -> None:
    """Gradients whole from the first backward on, and nothing else: no flat tensors anywhere."""
    block = BlockMemory(saved=10, forward=12, workspace=5, one_op=5, halving=5)
    grown = Hold(kind="gradients", since=Event.AFTER_BACKWARD, until=Event.NEXT_BEGIN, whole=1)
    group = MemoryGroup(
        Exchange((*STATE, grown)), (Bucket(1, 100, 1), Bucket(0, 100, 1)),
        (100, 100), (100, 100), (60, 60),
    )  # fmt: skip
    made = StageMemory(
        groups=(replace(group, shards=2),), prefetch=3, parameters=0, optimizer=0,
        temporary=70, border=0, entry=0, border_back=0, entry_back=0, blocks=(block,) * 2,
    )  # fmt: skip
    assert (made.always.total, made.begun.gradients, made.forward.total) == (0, 200, 22)
    assert made.end.gradients == 200 and made.end.total == 270
    zeros = Exchange((*STATE, Hold(kind="gradients", whole=1, **ALWAYS)))
    flat = replace(made, groups=(replace(group, exchange=zeros),))
    assert (flat.always.gradients, flat.begun.total, flat.end.gradients) == (200, 0, 0)


def _arrays(problem: Problem) -> list[np.ndarray]:
    """Rates, from which bounds come, and figures of stages, of meshes that split gradients."""
    runs = RunCosts(problem)
    tables = StageTables(runs, ChoiceSpace(problem).places[0])
    found: list[np.ndarray] = []
    for prefetch, shape in ((0, (2, 2)), (0, (1, 4))):
        mesh = Mesh(*shape, (), 2, "", prefetch)
        case = tables.case(0, mesh, 2)
        rates = BlockRates(runs)
        found += rates.of([case], rates.steady([case], 2), 2)
        found += tables.entry(case, "keep", None, 2)
    return found


def _priced(problem: Problem) -> list[str]:
    """Predictions of plans, with all that they rest on."""
    found = []
    for shape in ({"dp_shard": 4}, {"dp_shard": 2, "dp_replicate": 2}, {"pp": 2, "dp_shard": 2}):
        choice = uniform_choice(problem, zero=2, num_microbatches=2, **shape)  # type: ignore[arg-type]
        plan = build_plan(problem, choice)
        made = estimate_all(problem.graph, problem.cluster, plan)
        found.append(repr((made.prediction, [(m.finish, m.publish) for m in made.models])))
    return found


def test_a_form_under_any_name_has_the_same_prices_and_bounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "quokka_71"
    source = (Path(forms.__file__).parent / "zero2.py").read_text()
    (tmp_path / f"{name}.py").write_text(source)
    asked = problem(mlp(4), cluster(4))
    known = _priced(asked), _arrays(asked)
    monkeypatch.setattr(forms, "__path__", [*forms.__path__, str(tmp_path)])
    monkeypatch.setattr(forms, "_FILES", Files(forms, "form of synchronisation"))
    loaded = []

    def renamed(zero: int, dp_shard: int) -> str:
        if zero == 2 and dp_shard > 1:
            loaded.append(name)
            return name
        return old(zero, dp_shard)

    old = plans.sync_name
    for module in (plans, space, candidates):
        monkeypatch.setattr(module, "sync_name", renamed)
    again = problem(mlp(4), cluster(4))
    priced, arrays = _priced(again), _arrays(again)
    assert len(loaded) > 5 and exchange(name, 4) is not exchange("zero2", 4)
    assert priced == known[0]
    assert len(arrays) == len(known[1]) > 20
    for mine, theirs in zip(arrays, known[1], strict=True):
        assert np.array_equal(mine, theirs)


def test_folders_of_a_users_own(tmp_path: Path) -> None:
    (tmp_path / "wombat_3.py").write_text((Path(forms.__file__).parent / "zero1.py").read_text())
    code = "from meshwright.forms.sync import exchange; print(exchange('wombat_3', 2).packs)"
    done = python("-c", code, MESHWRIGHT_SYNC=str(tmp_path))
    assert done.stdout.split() == ["True"], done.stderr


LEFT = {
    "meshwright/exporters/accelerate.py": "the level is the other system's word",
    "meshwright/exporters/deepspeed.py": "the same",
    "meshwright/exporters/huggingface.py": "the same",
    "meshwright/exporters/megatron.py": "the same",
    "meshwright/exporters/torchtitan.py": "the same",
    "meshwright/forms/sync": "forms",
}
"""Files that still look into the number of a level, and why."""


def _levels_compared(source: str) -> int:
    """Comparisons of `zero` with numbers, and tests whether it is 0."""
    if not re.search(r"\bzero\b", source):
        return 0  # most files have no such name, and parsing them all takes five seconds

    def is_level(node: ast.AST) -> bool:
        return (isinstance(node, ast.Name) and node.id == "zero") or (
            isinstance(node, ast.Attribute) and node.attr == "zero"
        )

    def is_number(node: ast.AST) -> bool:
        parts = node.elts if isinstance(node, ast.Tuple) else [node]
        return all(isinstance(p, ast.Constant) and isinstance(p.value, int) for p in parts)

    found = 0
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare):
            parts = [node.left, *node.comparators]
            found += any(map(is_level, parts)) and any(map(is_number, parts))
        tested = [node.test] if isinstance(node, ast.If | ast.IfExp | ast.While) else []
        tested += node.values if isinstance(node, ast.BoolOp) else []
        tested += node.ifs if isinstance(node, ast.comprehension) else []
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            tested.append(node.operand)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            tested += node.args if node.func.id == "bool" else []
        found += sum(map(is_level, tested))
    return found


def test_nobody_else_knows_a_level() -> None:
    assert _levels_compared("if s.zero == 3 and zero in (1, 2): pass") == 2
    assert _levels_compared("x = 1 if zero else 2") == _levels_compared("bool(s.zero)") == 1
    assert not _levels_compared("f(zero=s.zero); s.zero == t.zero")
    folders = ("ir", "costmodel", "planner", "codegen", "runtime", "meshwright")
    found = {
        str(path.relative_to(ROOT))
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
        if _levels_compared(path.read_text())
    }
    assert {name for name in found if not name.startswith(tuple(LEFT))} == set()
    unused = {name for name in LEFT if not any(f.startswith(name) for f in found)}
    assert unused <= {"meshwright/forms/sync"}, f"take these off the list: {unused}"

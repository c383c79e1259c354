"""Tables with a cache: equal to one process without, whatever the cache."""

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.forms.cache import moving
from meshwright.forms.host_link import shaped
from meshwright.forms.sync_findings import findings
from meshwright.forms.tables import stepping_notes, table_findings
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.errors import Infeasible
from meshwright.ir.plan.plan import FormChoice, ParameterChoice, Plan
from meshwright.ir.plan.summed import summed_axes
from meshwright.ir.profile import measured
from meshwright.ir.profile.row_counts import RowCounts
from meshwright.ir.trace.trace import trace
from meshwright.planner.search.search import search
from meshwright.profiling.rows import count_rows
from meshwright.runtime.checkpoint.export import full_state
from meshwright.testing.spawn import RankFailed, alone, run_ranks
from tests.form_files.caches import all_trained, job_of, plan_of, trained
from tests.form_files.words import STEPS, VOCAB, assert_equal, batch, error_beyond, model, plain

LARGEST = 48 / VOCAB
"""As many slots as a batch has look-ups."""
LINK = 20e6
"""Bytes per second: rows are on their way for a while."""


@pytest.mark.sampled
@pytest.mark.parametrize(("ranks", "prefetch"), [(1, 0), (1, 2), (1, 3), (2, 1), (3, 2)])
def test_training_is_that_of_one_process_without(ranks: int, prefetch: int) -> None:
    """From as few slots as the largest batch takes to all rows, 203 and 50 of them."""
    few = LARGEST if ranks == 1 else 0.3
    plans = [
        plan_of(ranks, "adagrad", ratio=ratio, policy=policy, prefetch=prefetch)
        for ratio, policy in [(few, "lru"), (few, "lfu"), (0.5, "learnt"), (1.0, "lfu")]
    ]
    assert not [finding for plan in plans for finding in findings(plan)]
    wanted = alone(plain, "adagrad", 0.05, None)
    with shaped(LINK):
        every = run_ranks(ranks, all_trained, [(plan, {"depth": prefetch}) for plan in plans])
    for number, plan in enumerate(plans):
        assert_equal(every[0][number], wanted)
        for rank in every:
            words = rank[number][2][0]
            store = plan.stages[0].by_parameter["words.weight"].store
            assert words.path == "words.weight" and store
            if store.settings["ratio"] == 1.0:
                assert not words.written
            elif store.settings["ratio"] == LARGEST and ranks == 1:
                assert words.slots == 48 and words.written > 100


COPIES = {"zero": 1, "dp_shard": 2, "dp_replicate": 2}
"""Two copies of two owners."""


def test_copies_of_owners_have_a_cache_each(tmp_path: Any) -> None:
    """Each has the rows that the batch of any of them reads, whichever optimizer steps them;
    batches that come are known, or not; a checkpoint goes on without copies."""
    without = plan_of(4, "adagrad", ratio=0.5)
    broken = {"broken": str(tmp_path / "kept"), "then": without, "depth": 1}
    cases: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("adagrad", {"ratio": 0.4, "policy": "lru", "prefetch": 2}, {"depth": 2}),
        ("sgd", {"ratio": 0.5, "prefetch": 0}, {"clip": 0.3, "read": True}),
        ("adamw", {"ratio": 0.4}, {"depth": 1}), ("adagrad", {"ratio": 0.3}, broken),
    ]  # fmt: skip
    plans = [plan_of(4, name, sizes=COPIES, **told) for name, told, _ in cases]
    assert not [finding for plan in plans for finding in findings(plan)]
    with shaped(LINK):
        every = run_ranks(4, all_trained, [
            (plan, how) for plan, (_, _, how) in zip(plans, cases, strict=True)
        ])  # fmt: skip
    for number, (name, _, how) in enumerate(cases):
        assert_equal(every[0][number], alone(plain, name, 0.05, how.get("clip")))
    of_first = [rank[0][2][0] for rank in every]
    # Ranks 0 and 2 own the same rows, of which the batch of all is read.
    assert of_first[0] == of_first[2] and of_first[0].written > 40


def test_model_axes_and_stages_beside_it() -> None:
    """Tables by columns over tp, and one stage of two that has them."""
    sizes: list[dict[str, int]] = [{"tp": 2}, {"pp": 2}]
    plans = [(plan_of(2, "adagrad", sizes=each, ratio=0.4), {"depth": 1}) for each in sizes]
    for one in run_ranks(2, all_trained, plans)[0]:
        assert_equal(one, alone(plain, "adagrad", 0.05, None))


@pytest.mark.parametrize("ranks", [1, 2])
def test_optimizers(ranks: int) -> None:
    """With moments and decay of rows that do not occur; somebody looks at all after each step; a
    norm that is limited."""
    cases: list[tuple[str, dict[str, Any]]] = [
        ("sgd", {"depth": 1, "read": True}), ("sgd_momentum", {"depth": 1}),
        ("adamw", {"depth": 1, "read": True}), ("adagrad", {"clip": 0.3}),
    ]  # fmt: skip
    plans = [(plan_of(ranks, optimizer, ratio=0.4), how) for optimizer, how in cases]
    with shaped(LINK):
        found = run_ranks(ranks, all_trained, plans)[0]
    for (optimizer, how), one in zip(cases, found, strict=True):
        assert_equal(one, alone(plain, optimizer, 0.05, how.get("clip")))


def test_checkpoints_do_not_know_of_it(tmp_path: Any) -> None:
    """Written with a cache and read with another, and without; and the other way round."""
    few, many = (plan_of(1, "adagrad", ratio=ratio) for ratio in (0.3, 0.9))
    without = plan_of(1, "adagrad", cached=False)
    cases = [(few, many), (few, without), (without, few)]
    found = run_ranks(1, all_trained, [
        (first, {"depth": 1, "broken": str(tmp_path / str(number)), "then": then})
        for number, (first, then) in enumerate(cases)
    ])[0]  # fmt: skip
    for one in found:
        assert_equal(one, alone(plain, "adagrad", 0.05, None))


def _counted() -> RowCounts:
    return count_rows(model(), [batch(step) for step in range(STEPS)])


def test_rows_that_were_counted_come_first(tmp_path: Any) -> None:
    """From a file; what occurs most is there from the beginning, and stays."""
    file = tmp_path / "rows.json"
    _counted().save(file)
    plan = plan_of(1, "adagrad", ratio=0.4, policy="frequency")
    other = plan_of(1, "adagrad", ratio=0.4, policy="lru")
    found = run_ranks(1, all_trained, [(plan, {"rows": str(file)}), (other, {})])[0]
    assert_equal(found[0], alone(plain, "adagrad", 0.05, None))
    counted, last_use = (one[2][0] for one in found)
    assert counted.here > last_use.here + 20
    with pytest.raises(RankFailed, match="nobody has counted them; give rows="):
        run_ranks(1, all_trained, [(plan, {})])


def test_narrow_copies_are_those_of_cached_rows() -> None:
    """Blocks read bfloat16, float32 is stepped: as without a cache, but for the order of sums."""
    cached, without = (
        plan_of(1, "adagrad", "bf16", cached=cached, ratio=0.4) if cached
        else plan_of(1, "adagrad", "bf16", cached=False) for cached in (True, False)
    )  # fmt: skip
    found, wanted = run_ranks(1, all_trained, [(cached, {"depth": 1}), (without, {})])[0]
    assert found[0] == pytest.approx(wanted[0], rel=2e-2)
    for name, x in wanted[1].items():
        assert (found[1][name] - x).abs().max() <= 0.02 * x.abs().max(), name


def _checked(plan: Plan) -> tuple[bool, list[float]]:
    job = job_of(plan, check=True)
    done = job.checked is not None and not any("the plan" in each for each in job.checked.unchecked)
    losses = [float(job.step(batch(step))) for step in range(STEPS)]
    job.close()
    return done, losses


def test_the_self_check_takes_it() -> None:
    """And training is then as if it had not been."""
    done, losses = run_ranks(1, _checked, plan_of(1, "adagrad", ratio=0.4))[0]
    assert done
    assert losses == pytest.approx(alone(plain, "adagrad", 0.05, None)[0], rel=1e-10)


def _accumulated(plan: Plan) -> list[float]:
    job, losses = job_of(plan), []
    for step in range(0, STEPS, 2):
        first = job.accumulate(batch(step), next_batch=batch(step + 1))
        job.eval(batch(step + 3))
        after = batch(step + 2) if step + 2 < STEPS else None
        second = job.accumulate(batch(step + 1), next_batch=after)
        job.eval(batch(step + 4 if step < 2 else 7))
        job.apply(0.5)
        losses += [float(first), float(second), float(job.eval(batch(7)))]
    job.close()
    return losses


def test_accumulated_batches_and_validation_between() -> None:
    own, wanted = model(), []
    stepped = torch.optim.Adagrad(own.parameters(), lr=0.05)
    for step in range(0, STEPS, 2):
        stepped.zero_grad()
        for number in (step, step + 1):
            loss = own(*batch(number))
            (loss / 2).backward()
            wanted.append(float(loss.detach()))
        stepped.step()
        wanted.append(float(own(*batch(7)).detach()))
    for ranks, sizes in ((1, None), (2, None), (4, COPIES)):
        plan = plan_of(ranks, "adagrad", sizes=sizes, ratio=0.9)
        found = run_ranks(ranks, _accumulated, plan)[0]
        assert found == pytest.approx(wanted, rel=1e-10)


def _grown(plan: Plan) -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = trained(plan, 1)
    return found, [str(one.message) for one in said]


def test_a_batch_that_does_not_fit_grows_the_cache_and_says_so() -> None:
    found, said = run_ranks(1, _grown, plan_of(1, "adagrad", ratio=10 / VOCAB))[0]
    assert_equal(found, alone(plain, "adagrad", 0.05, None))
    (told,) = [one for one in said if "words.weight" in one]
    assert "its cache has 10 slots: it grows" in told and "ratio 0." in told
    assert found[2][0].slots > 40


def _failed(plan: Plan) -> list[str]:
    """What is said of a table after its second thread has failed, by whoever looks at it."""
    job, found = job_of(plan), []
    job.step(batch(0), next_batch=batch(1))
    runs = [run for run in job.parts.stages[0].sync._runs if run.reads_batches]
    (table,) = [t for run in runs for t in run._tables if t.path == "words.weight"]

    def full(*_: Any, **__: Any) -> Any:
        del table.map.admit  # once
        raise MemoryError("no room")

    table.map.admit = full
    rows = batch(3)[0].unique()
    for look in (
        lambda: job.step(batch(1), next_batch=batch(2)), lambda: job.step(batch(1)),
        lambda: job.eval(batch(1)), lambda: full_state(job), job.close,
        lambda: table.admit(rows), lambda: table.owned(rows), table.over, table.flush, table.forget,
        lambda: table.summed(rows, ()), lambda: table.kept, lambda: table.found,
        lambda: table.is_flushed,
    ):  # fmt: skip
        try:
            look()
            found.append("went on")
        except MemoryError as error:
            found.append(str(error))
    return found


def _under_way(plan: Plan) -> list[int]:
    """What is begun on the second thread and has not been waited for where rows are stepped."""
    job, found = job_of(plan), []
    runs = [run for run in job.parts.stages[0].sync._runs if run.reads_batches]
    (table,) = [t for run in runs for t in run._tables if t.path == "words.weight"]
    state_at = table.moving.state_at

    def watched(at: Tensor) -> dict[str, Tensor]:
        found.append(len(table._beside._begun))
        return state_at(at)  # type: ignore[no-any-return]

    table.moving.state_at = watched
    for step in range(3):
        job.step(batch(step), next_batch=batch(step + 1))
    job.close()
    return found


def test_rows_are_stepped_while_nothing_else_moves() -> None:
    with shaped(LINK):
        (found,) = run_ranks(1, _under_way, plan_of(1, "adagrad", ratio=0.4))
    assert found == [0] * 3


def test_nobody_goes_on_with_what_a_second_thread_left_half_done() -> None:
    with shaped(LINK):
        (said,) = run_ranks(1, _failed, plan_of(1, "adagrad", ratio=0.4))
    assert said == ["no room"] * 14


def _numbered_anew(plan: Plan) -> Any:
    moving._MOST_DEPARTURES = 3
    return trained(plan, 1)


def test_rows_on_their_way_are_numbered_anew_now_and_then() -> None:
    with shaped(LINK):
        (found,) = run_ranks(1, _numbered_anew, plan_of(1, "adagrad", ratio=LARGEST))
    assert_equal(found, alone(plain, "adagrad", 0.05, None))


def _recorded(plan: Plan, file: str) -> Any:
    job = job_of(plan)
    for step in range(STEPS):
        job.step(batch(step))
    measured.save(job.measured(), file)
    job.close()
    return measured.load(file).caches


def test_hits_are_in_the_record_of_a_run(tmp_path: Any) -> None:
    """With all rows in slots, what is missed is what is read for the first time."""
    plan = plan_of(1, "adagrad", ratio=1.0)
    words, marks = run_ranks(1, _recorded, plan, str(tmp_path / "measured.json"))[0]
    each = [batch(step)[0].unique() for step in range(STEPS)]
    read, new = sum(map(len, each)), len(torch.cat(each).unique())
    assert (words.table, words.slots, words.rows) == ("words.weight", VOCAB, read)
    assert words.here == read - new and words.hit_rate == 1 - new / read
    assert not words.written and marks.table == "marks.weight"


def _no_row(plan: Plan) -> str:
    return error_beyond(job_of(plan))


def test_an_id_that_is_no_row_is_refused() -> None:
    (said,) = run_ranks(1, _no_row, plan_of(1, "adagrad", ratio=0.5))
    assert "index of words.weight is out of range" in said


def test_a_cache_that_is_of_no_use_is_named() -> None:
    (note, _) = stepping_notes(plan_of(1, "adamw"))
    assert "stepped on the host" in note.message and "adagrad" in note.nearest
    assert not list(stepping_notes(plan_of(1, "adagrad")))


def test_what_cannot_be_is_refused() -> None:
    (stage,) = plan_of(2, "adagrad").stages
    own = stage.by_parameter["words.weight"]
    assert own.store

    def said(**changed: Any) -> str:
        one = replace(own, **changed)
        found = replace(plan, stages=(replace(stage, by_parameter={"words.weight": one}),))
        return " ".join(f"{f.message}; {f.nearest}" for f in findings(found))

    plan = plan_of(2, "adagrad")
    assert not said()
    assert "sync owned_rows, or no replicas" in said(sync=None, zero=0)
    assert "ids names none" in said(store=FormChoice(form="cached"))
    deep = {**own.store.settings, "prefetch": 4, "policy": "lfru"}
    found = said(store=FormChoice(form="cached", settings=deep))
    assert "prefetch 3" in found and "policy lru" in found
    wrong = FormChoice(form="cached", settings={"ids": "1"})
    one = replace(plan_of(1, "adagrad").stages[0].by_parameter["words.weight"], store=wrong)
    alone_plan = plan_of(1, "adagrad")
    changed = replace(alone_plan.stages[0], by_parameter={"words.weight": one})
    (finding,) = table_findings(replace(alone_plan, stages=(changed,)), trace(model(), batch(0)))
    assert "others are read" in finding.message and "ids '0'" in finding.nearest


class _Along(torch.nn.Module):
    """Attention over a table's rows: cp leaves its gradient in parts."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(64, 16)
        self.layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        return self.layer(self.words(ids)).square().mean()


def test_no_search_gives_a_table_a_cache_whose_gradient_a_model_axis_sums() -> None:
    """A job refuses such a plan; so does a check."""
    given = {"ids": torch.zeros(4, 32, dtype=torch.int64)}
    graph, cluster = trace(_Along(), given), Cluster.local(2)
    (cpu,) = cluster.device_types
    slow = replace(cpu, peak_flops={"float32": 2e7}, memory_bandwidth_bytes_per_s=2e7)
    cluster = replace(cluster, device_types=(slow,))  # so that it pays to split all
    pins = ("cp=2", "parameters words.weight cache=50%")
    plan = search(graph, cluster, constraints=pins[:1], progress=False, optimizer="sgd")
    assert "cp" in summed_axes(plan, graph, 0)["words.weight"]
    cached = FormChoice(form="cached", settings={"ids": "ids"})
    chosen = {"words.weight": ParameterChoice(store=cached)}
    told = replace(plan, stages=(replace(plan.stages[0], by_parameter=chosen),))
    (finding,) = table_findings(told, graph)
    assert "summed over cp" in finding.message and "no store for words.weight" in finding.nearest
    with pytest.raises(Infeasible, match="cache=50%"):
        search(graph, cluster, constraints=pins, progress=False, optimizer="sgd")

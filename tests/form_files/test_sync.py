"""Forms of synchronisation that are dropped in under any name, and use what no form of ours does: a
rest that is kept between steps, the batches before they run, averages that arrive a step late, and
messages whose size the plan states."""

from pathlib import Path
from textwrap import dedent
from uuid import uuid4

from meshwright.testing.fresh import python
from tests.form_files.texts import BASE, LATE, READS, REST

SCRIPT = """
import sys
from dataclasses import replace
import pytest
import torch
from meshwright.ir.errors import PlanError
from meshwright.ir.plan.plan import FormChoice
from meshwright.ir.plan.plan_io import rehash
from meshwright.runtime.checkpoint.export import full_state
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.ir.cluster.cluster import Cluster
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import make_problem
from tests.form_files.small import batches, graph, model
from meshwright.testing.spawn import alone, run_ranks

NAME, FOLDER = sys.argv[1:]
PROBLEM = make_problem(graph(), Cluster.local(2), precision="fp64", optimizer="sgd")
CHOICE = uniform_choice(PROBLEM, num_microbatches=2, dp_replicate=2)
USUAL = build_plan(PROBLEM, CHOICE, predict=False)

def formed(**settings):
    choice = FormChoice(form=NAME, settings=settings)
    return rehash(replace(USUAL, stages=(replace(USUAL.stages[0], sync=choice),)))

def job_of(plan, check=False):
    return compile_job(model(), plan, optimizer="sgd", lr=0.1, device="cpu", graph=graph(),
                       check=check)

def data(step):
    return batches()[step % 5]

def take(job, first, last, **more):
    return [float(job.step(data(step), **more)) for step in range(first, last)]

def parallel(function, *args):
    return run_ranks(2, function, *args, timeout_s=200)
"""


def run(form: str, exact: bool, script: str, folder: Path) -> str:
    """Runs a script where the form lies in a folder of the user's own; what it says."""
    name = f"s{uuid4().hex[:8]}"
    (folder / f"{name}.py").write_text(BASE.format(exact=exact) + form)
    done = python("-c", SCRIPT + dedent(script), name, str(folder), MESHWRIGHT_SYNC=str(folder))
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout + done.stderr


def test_what_a_form_keeps_goes_through_a_checkpoint(tmp_path: Path) -> None:
    said = run(REST, False, """
        def broken():
            job = job_of(formed(), check=True)
            assert "changes what is computed" in str(job.checked.unchecked)
            losses = take(job, 0, 3)
            job.save(FOLDER + "/kept")
            losses += take(job, 3, 6)
            whole = full_state(job)
            job.close()
            again = job_of(formed())
            take(again, 0, 2)
            again.load(FOLDER + "/kept")
            assert take(again, 3, 6) == losses[3:]
            same = full_state(again)
            assert all(torch.equal(x, same[n]) for n, x in whole.items())
            again.load(FOLDER + "/kept", drop_sync_state=True)
            assert again.parts.stages[0].sync.steps == 0
            assert take(again, 3, 6) != losses[3:]
            again.close()
            other = job_of(USUAL)
            with pytest.raises(PlanError, match=NAME) as error:
                other.load(FOLDER + "/kept")
            assert "drop_sync_state=True" in str(error.value) and "zero0" in str(error.value)
            other.load(FOLDER + "/kept", drop_sync_state=True)
            take(other, 3, 4)
            other.save(FOLDER + "/none")
            other.close()
            again = job_of(formed())
            take(again, 0, 2)
            again.load(FOLDER + "/none")
            assert again.parts.stages[0].sync.steps == 0, "it begins anew"
            again.close()
            return losses

        def usual():
            return take(job_of(USUAL), 0, 6)

        (one, two), exact = parallel(broken), parallel(usual)[0]
        assert one == two and one != exact and abs(one[-1] / exact[-1] - 1) < 0.02
        print("done")
    """, tmp_path)  # fmt: skip
    assert "done" in said


def test_a_form_sees_the_batches_of_its_rank_before_they_run(tmp_path: Path) -> None:
    run(READS, True, """
        from meshwright.running.launch import _steps

        def seen():
            job = job_of(formed(), check=True)
            sync = job.parts.stages[0].sync
            assert sync.seen == [], "the check leaves no trace"
            job.step(data(0), next_batch=data(1))
            job.accumulate(job.shard(data(1)), sharded=True, next_batch=job.shard(data(2)))
            job.accumulate(data(2))
            job.apply(0.5)

            class Nothing:
                stepped = bool
                def __getattr__(self, name):
                    return lambda *args, **more: None

            nothing = Nothing()
            kinds = ["timed", "tracked", "timed"]
            _steps(job, kinds, iter([data(3), data(4)]), None, nothing, nothing, nothing)
            found = sync.seen, [job.shard(data(i))[0].tolist() for i in range(5)]
            job.close()
            return found

        for own, x in parallel(seen):
            assert x[0] != x[1]
            assert own == [
                ["begin", x[0], x[1]], ["begin", x[1], x[2]], ["more", x[2], None],
                ["begin", x[3], x[4]], ["begin", x[4], None],
            ]
        first, second = parallel(seen)
        assert first[1][0] != second[1][0]
    """, tmp_path)  # fmt: skip


def test_an_average_that_is_a_step_late_and_its_price(tmp_path: Path) -> None:
    run(LATE, False, """
        from meshwright.costmodel.explain.detail import detail_of
        from meshwright.costmodel.estimate import estimate_all

        def late(broken):
            job = job_of(formed())
            losses = take(job, 0, 3)
            if broken:
                job.save(FOLDER + "/late")
                job.close()
                job = job_of(formed())
                job.load(FOLDER + "/late")
            losses += take(job, 3, 6)
            job.close()
            return losses

        def emulated():
            trained, waiting, losses = model(), None, []
            for step in range(6):
                loss = trained(*data(step))
                made = torch.autograd.grad(loss, list(trained.parameters()))
                losses.append(float(loss.detach()))
                if waiting is not None:
                    with torch.no_grad():
                        for p, g in zip(trained.parameters(), waiting):
                            p -= 0.1 * g
                waiting = made
            return losses

        wanted = alone(emulated)
        assert wanted[0] != wanted[5]
        for broken in (False, True):
            assert parallel(late, broken)[1] == pytest.approx(wanted, rel=1e-12)

        def priced(net, **settings):
            cluster = Cluster.preset("v100-16", num_nodes=2, devices_per_node=1)
            between = replace(cluster.between_nodes, bandwidth_bytes_per_s=net, curves=())
            cluster = replace(cluster, between_nodes=between)
            problem = make_problem(graph(), cluster, precision="fp64", optimizer="sgd")
            choice = uniform_choice(problem, num_microbatches=2, dp_replicate=2)
            plan = build_plan(problem, choice, predict=False)
            sync = FormChoice(form=NAME, settings=settings) if settings else None
            plan = replace(plan, stages=(replace(plan.stages[0], sync=sync),))
            found = estimate_all(graph(), cluster, plan, problem.tables)
            (kind,) = detail_of(problem.tables, plan).kinds
            sent = sum(t.nbytes for t in kind.traffic if t.purpose == "gradients")
            (model,) = found.models
            return found.prediction, sent, model.memory

        def step_s(net, **settings):
            return priced(net, **settings)[0].step_s

        fast, slow = 1e12, 1e7
        usual = step_s(slow)
        unheard = step_s(fast, lag=1)
        assert step_s(slow, lag=1) < usual, "a step hides what is sent in it"
        assert step_s(slow, lag=1) == pytest.approx(step_s(slow, lag=3)), "one a step all the same"
        far, far_usual = step_s(1e5, lag=1), step_s(1e5)
        assert far > 100 * unheard and far < far_usual and far > 0.99 * (far_usual - unheard)
        assert step_s(1e5, lag=1, of_1000=50) < 0.2 * far

        _, dense, memory = priced(slow, lag=1)
        _, few, less = priced(slow, lag=1, of_1000=50)
        _, same, _ = priced(slow)
        assert dense == same and few == pytest.approx(0.05 * dense, abs=1)
        _, _, more = priced(slow, lag=3)
        trained = memory.groups[0].trained
        assert more.always.communication - memory.always.communication == 2 * trained
        assert memory.always.communication - less.always.communication == pytest.approx(
            0.95 * trained, abs=1)
    """, tmp_path)  # fmt: skip

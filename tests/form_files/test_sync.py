"""Forms of synchronisation that are dropped in under any name, and use what no form of ours does: a
rest that is kept between steps, the batches before they run, averages that arrive a step late, and
messages whose size the plan states."""

from pathlib import Path
from textwrap import dedent
from uuid import uuid4

from meshwright.testing.fresh import python

BASE = """
import torch
import torch.distributed as dist
from meshwright.forms.exchange import Event, Exchange, Hold, Send
from meshwright.forms.flat import held_whole, trainable
from meshwright.forms.running import SyncRun
from meshwright.ir.layout.conversions import Primitive

EXACT = {exact}
ALWAYS = {{"since": Event.BEGIN, "until": Event.NEXT_BEGIN, "whole": 1}}
STATE = (
    Hold(kind="optimizer", **ALWAYS),
    Hold(kind="gradients", since=Event.AFTER_BACKWARD, until=Event.NEXT_BEGIN, whole=1),
)
SUM = {{"what": "gradients", "primitive": Primitive.ALL_REDUCE, "axis": "dp", "unit": "bucket",
        "until": Event.END}}

def check(stage):
    if stage.zero:
        yield "only whole parameters", "zero 0"

class Whole(SyncRun):
    def __init__(self, slots, lines):
        self.slots, self.lines = trainable(slots), lines
        self.held = held_whole(slots, lines)
        self.load({{}})

    def begin(self, batch=None, next_batch=None):
        for slot in self.slots:
            slot.whole.grad = None

    def gradient(self, slot):
        return torch.zeros_like(slot.whole) if slot.whole.grad is None else slot.whole.grad

    def sum(self, x):
        dist.all_reduce(x, group=self.lines.replicas.group)
        return x

def build(slots, lines, stage, store):
    return Form(slots, lines)
"""
REST = """
def describe(replicas, sharded=True, settings={}):
    return Exchange((*STATE, Hold(kind="kept", **ALWAYS), Send(at=Event.AFTER_LAST, **SUM)))

class Form(Whole):
    '''Sends what is a multiple of 1/64 of the gradient and the rest of the steps before.'''

    def finish(self):
        self.steps += 1
        for slot, rest in zip(self.slots, self.rests):
            rest += self.gradient(slot).detach()
            sent = (64 * rest).round() / 64
            rest -= sent
            slot.whole.grad = self.sum(sent)

    def state(self):
        if not self.steps:
            return {}
        named = zip(self.slots, self.rests)
        return {"steps": self.steps, **{f"rest of {s.param.fqn}": x for s, x in named}}

    def load(self, state):
        self.steps = state.get("steps", 0)
        self.rests = [
            state.get(f"rest of {s.param.fqn}", torch.zeros_like(s.whole)).clone().detach()
            for s in self.slots
        ]
"""
READS = """
def describe(replicas, sharded=True, settings={}):
    return Exchange((*STATE, Send(at=Event.AFTER_LAST, **SUM)))

class Form(Whole):
    reads_batches = True

    def begin(self, batch=None, next_batch=None):
        super().begin()
        if batch is not None:
            self.more(batch, next_batch, "begin")

    def more(self, batch=None, next_batch=None, what="more"):
        self.seen.append([what, batch["0"].tolist(), next_batch and next_batch["0"].tolist()])

    def finish(self):
        for slot in self.slots:
            slot.whole.grad = self.sum(self.gradient(slot))

    def state(self):
        return {"seen": self.seen}

    def load(self, state):
        self.seen = list(state.get("seen", []))
"""
LATE = """
def describe(replicas, sharded=True, settings={}):
    late = Send(at=Event.END, lag=settings.get("lag", 1), share="rows", **SUM)
    return Exchange((*STATE, late), stated={"rows": settings.get("of_1000", 1000) / 1000})

class Form(Whole):
    '''A step takes the gradients of the one before it.'''

    def finish(self):
        for i, slot in enumerate(self.slots):
            x = self.gradient(slot).detach().clone()
            work = dist.all_reduce(x, group=self.lines.replicas.group, async_op=True)
            slot.whole.grad = self._arrived(i)
            self.under_way[i] = x, work

    def _arrived(self, i):
        x, work = self.under_way.pop(i, (torch.zeros_like(self.slots[i].whole), None))
        if work is not None:
            work.wait()
        return x

    def state(self):
        return {str(i): self._kept(i) for i in list(self.under_way)}

    def _kept(self, i):
        x = self._arrived(i)
        self.under_way[i] = x, None
        return x

    def load(self, state):
        self.under_way = {int(i): (x.clone(), None) for i, x in state.items()}
"""
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
from tests.spawn import alone, run_ranks

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
                by = None
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

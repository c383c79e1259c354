"""Dry runs: hundreds of ranks in one process, and the same bytes as a run that happened."""

import re
import sys
from dataclasses import replace
from io import StringIO

import pytest
import torch
import torch.distributed as dist
from rich.console import Console

import meshwright as mw
from meshwright.ir.errors import MismatchError
from meshwright.ir.text.units import size
from meshwright.ir.torch_fake import fake_world
from meshwright.ir.torch_private import fake_mode
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import make_problem
from meshwright.testing.spawn import run_ranks
from meshwright.tools.dry import run
from meshwright.tools.dry.classes import rank_classes
from meshwright.tools.dry.run import dry_run
from meshwright.tools.dry.shorten import shortened
from meshwright.tools.dry.show import show
from meshwright.tools.dry.transfers import check_transfers
from tests.integrations.setting import model
from tests.planner.problems import traced

BYTES_REL = 0.02
"""So far are a dry run's bytes from a real one's."""


def gpt2(batch):
    tokens = torch.zeros(batch, 8, dtype=torch.int64)
    return mw.trace(model(), {"input_ids": tokens, "labels": tokens})


def plan_on(graph, num_devices, **asked):
    cluster = mw.Cluster.preset("a100-40", num_nodes=-(-num_devices // 8), devices_per_node=8)
    problem = make_problem(graph, cluster, precision="fp64")
    return build_plan(problem, uniform_choice(problem, **asked))


def stepped(plan, graph):
    """A dry run in a process of its own."""
    return run_ranks(1, _dry_run, plan, graph, init=False)[0]


def _dry_run(rank, store, plan, graph):
    return dry_run(plan, graph)


def test_256_ranks_in_one_process():
    graph = gpt2(128)
    plan = plan_on(graph, 256, pp=2, dp_replicate=4, dp_shard=16, tp=2, zero=1, num_microbatches=2)
    done = stepped(plan, graph)
    assert done.world_size == 256 and not [f for f in done.findings if f.severity == "error"]
    assert len(done.ranks) <= 8, "equal ranks are stepped once"
    assert done.seconds < 60
    # Lines of four axes, both ways to one neighbour, a shared weight, and all ranks.
    assert (done.start.world_size, done.start.rank_groups) == (256, 8)
    console = Console(file=StringIO(), width=200)
    show(done, console)
    assert re.search(r"at start [\d,]+ groups, 8 of a rank at most; \d+ sockets of a rank at most "
                     r"\(rank \d+\), 769 of the job's store; [\d,]+ operations of the store; "
                     r"about \d+\.\d s \(estimate\)", console.file.getvalue())  # fmt: skip
    state = max(r.memory.parameters_bytes + r.memory.optimizer_bytes for r in done.ranks)
    assert f"at most {size(5 * state)} for each rank of a node" in console.file.getvalue()
    assert all(rank.memory.peak_bytes > rank.memory.parameters_bytes > 0 for rank in done.ranks)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "asked",
    [
        {"pp": 2, "num_microbatches": 4},
        {"dp_shard": 2, "zero": 3, "recompute": "full", "num_microbatches": 2},
        {"tp": 2, "num_microbatches": 1},
        {"dp_shard": 2, "zero": 2, "num_microbatches": 2},
    ],
)
def test_the_bytes_are_those_of_a_run(asked):
    graph = gpt2(8)
    problem = make_problem(graph, mw.Cluster.local(2), precision="fp64")
    plan = build_plan(problem, uniform_choice(problem, **asked))
    counted = {
        rank: group.memory.peak_bytes
        for group in stepped(plan, graph).ranks
        for rank in group.ranks
    }
    for rank, real in enumerate(run_ranks(2, _tracked, plan, graph, counted)):
        assert counted[rank] == pytest.approx(real, rel=BYTES_REL)


def _tracked(plan, graph, counted):
    # A thread of Gloo may let go of a tensor late, which only adds: then all ranks try again.
    wanted = pytest.approx(counted[dist.get_rank()], rel=BYTES_REL)
    least = _peak(plan, graph)
    for _ in range(2):
        late = torch.tensor(least != wanted, dtype=torch.int)
        dist.all_reduce(late)
        if not late:
            break
        least = min(least, _peak(plan, graph))
    return least


def _peak(plan, graph):
    tokens = torch.zeros(8, 8, dtype=torch.int64)
    job = mw.compile(model(), plan, device="cpu", graph=graph)
    job.step({"input_ids": tokens, "labels": tokens})  # makes the optimizer's state
    job.track_memory({"input_ids": tokens, "labels": tokens})
    peak = job.tensor_memory.peak_bytes
    job.close()
    return peak


def test_only_micro_batches_that_tell_something_are_stepped():
    graph = gpt2(64)
    plan = plan_on(graph, 2, pp=2, num_microbatches=16)
    short = shortened(plan)
    assert short.num_microbatches == 3 and short.samples_per_microbatch == 4
    whole = plan_on(graph, 2, pp=2, num_microbatches=4, schedule="gpipe")
    assert shortened(whole) == whole, "all are held at once"


def test_a_transfer_that_does_not_fit_is_found():
    graph = gpt2(16)
    plan = plan_on(graph, 4, pp=2, dp_replicate=2, num_microbatches=2)
    first, second = (group for group in rank_classes(plan, graph))
    assert not list(check_transfers(plan, (first, second)))
    (value, *rest) = second.programs[0].receives
    wrong = replace(value, shape=(*value.shape[:-1], value.shape[-1] + 1))
    program = replace(second.programs[0], receives=(wrong, *rest))
    (finding, *_) = check_transfers(plan, (first, replace(second, programs=(program,))))
    assert finding.rule == "transfer" and "elements of float64 against" in finding.message


def test_experts_are_stepped_too():
    graph = traced("mixtral")
    done = stepped(plan_on(graph, 2, pp=2), graph)
    assert done.world_size == 2 and not [f for f in done.findings if f.rule == "dry run"]


def _reads_a_value(*args):
    with fake_mode():
        return bool(torch.ones(2).sum() > 0)


def test_what_depends_on_values_is_named(monkeypatch):
    monkeypatch.setattr(run, "step_rank", _reads_a_value)
    graph = gpt2(8)
    (finding,) = dry_run(plan_on(graph, 2, pp=2), graph).findings
    assert finding.severity == "warning" and "_local_scalar_dense" in finding.message


def _inside_a_job():
    with pytest.raises(MismatchError, match="a process of its own"), fake_world(4, 0):
        pass
    return dist.get_world_size()


def test_errors_of_later_are_not_those_of_a_rank():
    before = sys.excepthook
    with fake_world(4, 2):
        assert sys.excepthook is not before
    assert sys.excepthook is before


def test_a_real_job_is_left_alone():
    assert run_ranks(1, _inside_a_job) == [1]

"""A job goes on with what is left of its machine, as if nothing had been lost."""

import json
import signal
import time
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

import meshwright as mw
from meshwright.ir.cluster.remaining import without
from meshwright.ir.errors import PlanError
from meshwright.ir.plan import plan_io
from meshwright.running import elastic, launch
from meshwright.running import spares as spares_file
from meshwright.running.all_starts import start_folder, steps_of_all
from meshwright.running.crew import OwnMachine, visible
from meshwright.running.elastic import Supervisor, check_elastic, run_elastic
from meshwright.running.log_writers import JSONL
from meshwright.running.ranks import JobEnd, Ranks
from meshwright.running.replan import Replanner
from meshwright.running.spares import Spares
from meshwright.running.verdict import judge
from meshwright.runtime.step.executor import RankProgress
from meshwright.runtime.world import launcher
from meshwright.runtime.world.exit_codes import RETRY, STOP
from meshwright.runtime.world.failure import FirstFailure
from meshwright.runtime.world.launcher import open_store
from meshwright.runtime.world.standing import dumps, standing
from meshwright.testing.spawn import alone
from tests.command_line import invoke
from tests.planner.problems import cluster, mlp

ROOT = Path(__file__).parents[2]
STEPS = 6
TRAIN = """
import os, pathlib, signal, time, torch
from torch import nn
from meshwright.runtime.checkpoint.node_memory import given_memory
from meshwright.runtime.job import memory_saves

if "RANK" in os.environ:  # the supervisor builds the model as well, in the process of the tests
    memory_saves.LEAST_S, memory_saves.SHARE = 0.0, 1e9

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.drop = nn.Linear(8, 8), nn.Linear(8, 4), nn.Dropout(0.3)

    def forward(self, x, y):
        return ((self.b(self.drop(torch.tanh(self.a(x)))) - y) ** 2).sum() / x.shape[0]

def batch(number):
    generator = torch.Generator().manual_seed(number)
    return tuple(torch.randn(4, n, generator=generator, dtype=torch.float64) for n in (8, 4))

def model():
    return Net().double(), batch(0)

def data():
    for number in range(1000):
        if number == 3 and (os.environ.get("MESHWRIGHT_STARTED"), os.environ["RANK"]) == ("0", "1"):
            until = time.monotonic() + 30  # the state of a step before is whole in memory
            newest = given_memory().folder / "latest"
            while not newest.exists() and time.monotonic() < until:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        yield batch(number)
"""


def _whole(train, plan):
    model, example = train.model()
    job = mw.compile(model, plan, lr=1e-2, check=False, example_inputs=example)
    return [float(job.step(train.batch(number))) for number in range(STEPS)]


class _OneSpare(Spares):
    """One from the start, so that a rank becomes of it however slow the machine."""

    became = ()

    def __enter__(self):
        self.count = 1
        self.add_one()
        return super().__enter__()

    def become(self, *given):
        found = super().become(*given)
        type(self).became += (found is not None,)
        return found


def test_a_killed_rank_is_gone_on_without(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(elastic, "Spares", _OneSpare)
    (tmp_path / "elastic_train.py").write_text(TRAIN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{tmp_path}")
    monkeypatch.setenv("MESHWRIGHT_CHECK", "0")
    train = import_module("elastic_train")
    model, example = train.model()
    asked = {"precision": "fp64", "progress": False, "example_inputs": example}
    one = mw.search(model, mw.Cluster.local(1), **asked)
    plan = mw.search(model, mw.Cluster.local(2), constraints=("dp_shard=2", "zero=1"), **asked)
    plan_io.save(plan, tmp_path / "plan.json")
    options = ["elastic_train:model", "--data", "elastic_train:data", "--steps", str(STEPS)]
    options += ["--save", str(tmp_path / "saved"), "--no-trace"]  # the disk has the end alone
    options += ["--log", "jsonl", "--lr", "1e-2"]
    code = run_elastic(
        tmp_path / "plan.json", "elastic_train:model", options, output=tmp_path / "run",
        cluster=None, retry_lost_s=600.0, as_json=True,
    )  # fmt: skip
    journal = [json.loads(x) for x in (tmp_path / "run/elastic.jsonl").read_text().splitlines()]
    assert code == 0, journal
    starts = [line for line in journal if line["what"] == "start"]
    assert [line["ranks"] for line in starts] == [2, 1]
    # What one rank cannot keep is said.
    assert [line["dropped"] for line in starts] == [[], ["dp_shard=2", "zero=1"]]
    assert _OneSpare.became[:2] == (True, False) and len(_OneSpare.became) == 3
    assert journal[1]["cause"] == "rank 1 was killed by SIGKILL, in step 3"
    assert journal[1]["lost"] == [1] and journal[3]["codes"] == [0]
    said = capfd.readouterr()
    assert "1 ranks, plan" in (err := said.err)
    assert "without 'dp_shard=2', 'zero=1', which cannot hold there" in err
    losses = {}
    for number in range(2):
        rows = (tmp_path / f"run/start-{number}/metrics.jsonl").read_text().splitlines()
        losses |= {x["step"]: x["loss_metrics/global_avg_loss"] for x in map(json.loads, rows)}
    found = [losses[step + 1] for step in range(STEPS)]
    steps = list(map(json.loads, said.out.splitlines()))
    assert {line["start"] for line in steps} == {0, 1} and steps[-1]["start"] == 1
    again = min(line["step"] for line in steps if line["start"] == 1)
    assert again == 2, "it goes on from memory"
    assert [{line["step"]: line["loss"] for line in steps}[step] for step in range(STEPS)] == found
    assert found == pytest.approx(alone(_whole, train, one), rel=1e-12)
    with pytest.raises(PlanError, match="low-rank"):
        check_elastic(replace(plan, gives_up=("low-rank gradients",)), mw.Cluster.local(2))
    with pytest.raises(PlanError, match="2 nodes"):
        check_elastic(plan, mw.Cluster.preset("a100-80", num_nodes=2))


def test_ranks_get_every_option_but_the_supervisors(monkeypatch):
    found = []
    monkeypatch.setattr(elastic, "run_elastic", lambda *given, **_: found.append(given[2]) or 0)
    monkeypatch.setattr(launch, "train", lambda *given, **more: found.append((given, more)))
    asked = ("--data", "t:d", "--steps", "7", "--lr", "0.5", "--save", "c", "--keep", "2",
             "--save-every", "3m", "--on-nonfinite", "back", "--hang", "9", "--resume",
             "--no-check", "--no-trace", "--tune")  # fmt: skip
    own = ("--elastic", "--retry-lost", "5", "--cluster", "local:2", "-o", "run", "--json",
           "--rdzv", "a:1,b:1", "--nodes", "1:2", "--node", "9")  # fmt: skip
    invoke("run", "p.json", "t:m", *asked, *own, "--log", "tensorboard")
    invoke("run", "p.json", *found[0])
    invoke("run", "p.json", "t:m", *asked, "--log", "tensorboard,jsonl")
    assert found[1] == found[2] and not set(own) & set(found[0])
    invoke("run", "p.json", "t:m", "--save", "c", "--elastic")
    assert found[3] == ["t:m", "--save", "c", "--log", "jsonl"]


def test_a_signal_while_a_plan_is_searched_ends_the_job(tmp_path):
    class Searching:
        def plan_without(self, lost):
            asked.append(signal.SIGTERM)

    asked = []
    assert Supervisor(Searching(), tmp_path, OwnMachine(None), 1.0).run(asked) == RETRY
    assert not list(tmp_path.iterdir()), "no rank was started"


def test_ranks_hear_of_a_signal_that_came_before_them():
    wait = "import time; print('started', flush=True); time.sleep(60)"
    with Ranks(2, ("-c", wait), open_store(), received=[signal.SIGTERM]) as ranks:
        end = ranks.wait()
    assert end.codes == {0: -15, 1: -15} and end.exit_code == 143


def test_all_ranks_that_died_are_lost():
    die = "import os, time; os.environ['RANK'] == '0' or os.kill(os.getpid(), 9); time.sleep(60)"
    with Ranks(3, ("-c", die), open_store()) as ranks:
        end = ranks.wait()
    assert end.lost == (1, 2) and end.exit_code == 137
    assert end.cause.text.endswith("before it took a step (and rank 2 by SIGKILL)")


def test_ranks_that_train_are_asked_to_leave_for_a_device(tmp_path):
    save = (
        "import os, pathlib, signal, time; signal.signal(signal.SIGUSR1, lambda *_: os._exit(75)); "
        f"pathlib.Path({str(tmp_path)!r}, os.environ['RANK']).touch(); time.sleep(60)"
    )
    with Ranks(2, ("-c", save), open_store()) as ranks:
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.01)
        told, progress = launcher.told(ranks.store, 0), RankProgress()
        for busy_s, rank, train in ((0.1, 0, False), (0.0, 1, False), (0.1, 1, True)):
            progress.at(7, "0F0", "running")  # it goes on from there
            progress.busy_s = busy_s
            told.set(f"meshwright/beat/{rank}", dumps(standing(progress), 1))
            assert ranks._train() == train, "all have taken a step"
        end = ranks.wait(lambda: True)
    assert end.saved and end.codes == {0: RETRY, 1: RETRY} and not end.lost


def test_a_device_that_is_lost_again_waits_longer(tmp_path, monkeypatch):
    supervisor = Supervisor(None, tmp_path, OwnMachine(None), 10.0)
    for wait_s in (10.0, 20.0, 40.0):
        supervisor._lose([1])
        assert supervisor.lost[1] - time.monotonic() == pytest.approx(wait_s, abs=1.0)
    supervisor.lost[2] = time.monotonic()
    supervisor._take_back()
    assert list(supervisor.lost) == [1]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible([0, 2]) == {"CUDA_VISIBLE_DEVICES": "0,2"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    assert visible([0, 2]) == {"CUDA_VISIBLE_DEVICES": "4,6"}


def _failed(kind, step, error, code=1):
    cause = FirstFailure(kind, 1, step, f"rank 1, step {step}: {error}", error)
    return JobEnd({0: -9, 1: code}, cause)


@pytest.mark.parametrize(
    ("end", "before", "again", "code"),
    [
        (_failed("raised", 5, "ValueError: x"), [], True, 0),
        (_failed("raised", 5, "ValueError: x"), [("raised", 4, "ValueError: x")], True, 0),
        (_failed("raised", 5, "ValueError: x"), [("raised", 5, "ValueError: x")], False, STOP),
        (_failed("died", 5, "SIGSEGV", -11), [("died", 5, "SIGSEGV")], False, STOP),
        (_failed("died", 5, "SIGKILL", -9), [("died", 5, "SIGKILL")], True, 0),
        (_failed("died", 5, "SIGKILL", -9), [("died", 5, "SIGKILL")] * 2, False, STOP),
        (_failed("died", -1, "SIGKILL", -9), [("died", -1, "SIGKILL")] * 2, False, STOP),
        (
            _failed("died", -1, "SIGKILL", -9),
            [("died", n, "SIGKILL") for n in (-1, -1, 8, -1, 9)],
            True,
            0,
        ),
        (_failed("raised", 5, "x"), [("raised", 5, "x"), ("died", 4, "x")], False, STOP),
        (_failed("raised", 5, "x"), [("raised", 5, "x"), ("died", 7, "x")], True, 0),
        (_failed("hung", 5, ""), [("hung", 5, "")], True, 0),
        (_failed("gone", -1, "node 1 is gone"), [("gone", -1, "node 1 is gone")] * 6, True, 0),
        (_failed("died", -1, "x", -9), [("gone", -1, "x")] * 6, True, 0),
        (_failed("gone", 5, "node 1 is gone"), [("gone", 5, "node 1 is gone")] * 2, False, STOP),
        (_failed("hung", 8, ""), [("hung", n, "") for n in (9, 3, 4, 5, 6)], False, STOP),
        (_failed("hung", 10, ""), [("hung", n, "") for n in (9, 3, 4, 5, 6)], True, 0),
        (_failed("raised", 5, "exit code 2", 2), [], False, 2),
        (_failed("raised", 5, "PlanError: disk full", -9), [], False, 4),
    ],
)
def test_the_same_again_is_the_end(end, before, again, code):
    found = judge(end, [FirstFailure(kind, 0, step, "", error) for kind, step, error in before])
    assert (found.again, found.exit_code) == (again, code)


def test_kills_before_a_step_count_in_a_row(tmp_path, monkeypatch):
    """Of starts between which none saved."""
    killed, saved = _failed("died", -1, "SIGKILL", -9), JobEnd({0: RETRY, 1: RETRY})
    ends = [killed, killed, saved] * 3 + [killed] * 9
    plans = SimpleNamespace(plan_without=lambda lost: None)
    supervisor = Supervisor(plans, tmp_path, OwnMachine(None), 0.0)
    monkeypatch.setattr(supervisor, "_start", lambda *_: ends.pop(0))
    assert supervisor.run([]) == STOP and len(ends) == 6


def test_a_spare_that_dies_is_not_started_again(tmp_path, monkeypatch):
    (tmp_path / "waits.py").write_text("import time; time.sleep(100)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(spares_file, "spare", SimpleNamespace(__name__="waits"))
    with Spares(2) as spares:
        for missing in (True, True, False):
            assert spares.are_missing == missing
            if missing:
                spares.add_one()
        first, second = spares._waiting
        first.kill()
        first.wait()
        assert not spares.are_missing and spares.pids == {second.pid}
    assert second.poll() == -signal.SIGKILL, "none is left"


def test_exit_codes_say_whether_to_come_again():
    assert JobEnd({0: RETRY, 1: RETRY}, asked_by=15).exit_code == RETRY
    assert JobEnd({0: 143, 1: 0}, asked_by=15).exit_code == 143
    assert JobEnd({0: 0, 1: 0}).exit_code == 0
    assert _failed("died", 1, "SIGKILL", -9).exit_code == 137
    assert _failed("raised", 1, "x", 4).exit_code == 4


def test_a_plan_for_what_is_left_may_fill_devices():
    """What one device needs is all that it has: a tenth that is kept free would end the job."""
    graph, roomy = mlp(), cluster(2)
    device = roomy.device_types[0]
    alone = mw.search(graph, without(roomy, [1]), objective="memory", progress=False)
    least = alone.predicted.peak_bytes
    tight = replace(device, reserved_bytes=device.memory_bytes - least)
    machine = replace(roomy, device_types=(tight,))
    plan = mw.search(graph, machine, memory_headroom=0.0, progress=False)
    replanner = Replanner(plan, machine, target=None, _graph=graph)
    assert replanner.plan_without([1]).plan.predicted.peak_bytes == least


def test_steps_that_a_job_before_left_in_the_folder_are_not_told(tmp_path):
    folder = start_folder(tmp_path, 0)
    folder.mkdir()
    names = ("loss_metrics/global_avg_loss", "time_metrics/end_to_end(s)")
    lines = [{"step": step, "time": step, **dict.fromkeys(names, 1.0)} for step in (1, 2, 3)]
    text = "\n".join([*map(json.dumps, lines), '{"step": 4'])
    (folder / JSONL).write_text(text)
    assert [found.step for found in steps_of_all(tmp_path, 1, 2.0)] == [1, 2]

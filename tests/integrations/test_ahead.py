"""Forms that work ahead see the next batch in others' loops too, and loops lose none by it."""

import json
from pathlib import Path
from uuid import uuid4

import pytest
import torch

from meshwright.integrations.ahead import BatchGroups, NextInputs, read_ahead
from meshwright.ir.errors import PlanError
from meshwright.testing.fresh import python
from meshwright.testing.spawn import run_ranks
from tests.form_files.texts import BASE, READS
from tests.integrations.as_torchrun import as_torchrun
from tests.integrations.loops import LOOPS, formed
from tests.integrations.setting import plan


@pytest.mark.parametrize("trainer", ["hf", "lightning"])
def test_a_form_sees_the_next_batch_of_a_trainer(trainer: str, tmp_path: Path) -> None:
    pytest.importorskip({"hf": "accelerate", "lightning": "lightning"}[trainer])
    name = f"s{uuid4().hex[:8]}"
    (tmp_path / f"{name}.py").write_text(BASE.format(exact=True) + READS)
    command = ("tests.integrations.loops", trainer, name, str(tmp_path))
    done = python("-m", *command, MESHWRIGHT_SYNC=str(tmp_path))
    assert done.returncode == 0, done.stderr[-4000:]
    ranks = json.loads(done.stdout.splitlines()[-1])
    for found in ranks:
        x = found["samples"]
        # Three steps of two batches: an epoch, and half of the next one. Only the Trainer of
        # transformers is asked whether there will be another step.
        last = {"hf": None, "lightning": x[2]}[trainer]
        assert found["whole"] == [
            ["begin", x[0], x[1]], ["more", x[1], x[2]], ["begin", x[2], x[3]],
            ["more", x[3], None], ["begin", x[0], x[1]], ["more", x[1], last],
        ]  # fmt: skip
        assert found["broken off"][2:] == found["whole"][2:]
    assert ranks[0]["samples"] != ranks[1]["samples"]


def _tuned(trainer: str, folder: str) -> list[str]:
    as_torchrun()
    with pytest.raises(PlanError, match="with buckets that cannot be cut anew"):
        LOOPS[trainer](plan(), folder, 1, tune=True)
    job = LOOPS[trainer](formed("dear", bucket_bytes=4096, ahead=1), folder, 3, tune=True)
    assert job.retuning is not None and not job.retuning.over
    kinds = [step.kind for step in job.stats.taken]
    job.close()
    return kinds


@pytest.mark.sampled
@pytest.mark.parametrize("trainer", ["hf", "lightning"])
def test_a_trainer_tunes_where_it_is_asked(trainer: str, tmp_path: Path) -> None:
    pytest.importorskip({"hf": "accelerate", "lightning": "lightning"}[trainer])
    pytest.importorskip("bayes_opt")
    plan()  # before the fork: made once
    for kinds in run_ranks(2, _tuned, trainer, str(tmp_path)):
        assert kinds == ["warm-up", "tuning", "tuning"]


def test_groups_are_read_ahead_only_where_asked_and_lose_nothing() -> None:
    for ahead in (False, True):
        groups, source = BatchGroups(), iter(range(5))
        assert groups.take(source, 2, ahead) == [0, 1]
        assert [groups.after(), groups.after()] == [1, 2 if ahead else None]
        assert groups.take(source, 2, ahead) == [2, 3]
        assert groups.take(source, 2, ahead) == [4]
        assert groups.after() is None and groups.take(source, 2, ahead) == []
    groups.take(iter(range(5)), 2, True)
    assert groups.take(iter(range(7, 9)), 2, True) == [7, 8], "not what a broken epoch has left"


class Placed(list[int]):
    """A loader that says how much of it was read."""

    at = 0

    def __iter__(self):
        for x in super().__iter__():
            self.at += 1
            yield x

    def state_dict(self) -> int:
        return self.at


def test_the_place_of_a_loader_is_that_of_the_batch_last_given() -> None:
    loader = read_ahead(Placed([5, 6, 7]))
    assert len(loader) == 3
    places = [(batch, loader.state_dict(), loader.after(batch)) for batch in loader]
    assert places == [(5, 1, 6), (6, 2, 7), (7, 3, None)]
    assert not hasattr(read_ahead([1]), "state_dict") and loader.at == 3


def test_next_inputs_are_made_as_those_of_this_step() -> None:
    first, second, third = ({"x": torch.ones(2) * i, "y": torch.zeros(2)} for i in range(3))
    known = NextInputs()
    known.step(first, second)
    found = known.after((first["y"], first["x"]))
    assert found[0] is second["y"] and found[1] is second["x"]
    known.step(second, third)
    with pytest.raises(PlanError, match="other tensors of a batch"):
        known.after((second["x"], second["y"]))
    known.step(first, second)
    assert known.after({"x": first["x"] * 2}) is None, "what the step makes itself is not known"

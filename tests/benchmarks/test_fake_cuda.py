"""Plans on GPUs that are not there: `python -m benchmarks.fake_cuda`."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.fake_cuda.page import page
from benchmarks.fake_cuda.plans import LISTED, OWN, Entry, Setting, entries
from benchmarks.fake_cuda.run import kept, run
from meshwright.ir.plan.plan import FormChoice
from meshwright.testing.equal_plans import LATE, PLANS, Case
from meshwright.testing.fake_gpu import process
from tests.sampled import ALL_CASES

pytestmark = pytest.mark.skipif(bool(process.why_not()), reason=process.why_not())


def test_plans_are_run_and_kept_and_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is sound, what a rule refuses, what waits and what fails; what is there runs once."""
    one = Case(1, {"num_microbatches": 2})
    sound, waits = Entry(LISTED, OWN, "one", one), {"store": FormChoice(form="update_on_host")}
    slow = replace(sound, group="store", kind="on the host", case=replace(one, stage=waits))
    host = {"store": FormChoice(form="shards_on_host")}
    no = replace(sound, group="mesh", kind="no", case=replace(one, stage=host))
    asked = [sound, slow, no]
    run(asked, tmp_path, limit_s=100)
    found = kept(tmp_path, asked)
    assert [found[x].sound for x in asked] == [True, False, False]
    assert found[slow].waits_as_said and not found[slow].faults
    unsaid = replace(found[slow], on_host=False)
    assert any(x.startswith("waits: ") for x in unsaid.faults) and not unsaid.waits_as_said
    assert "nearest: store whole" in found[no].refused and not found[no].ranks
    assert found[sound].ranks[0][1].calls.launches > 100
    assert f"{no.name}: refused" in capsys.readouterr().err
    run(asked, tmp_path, limit_s=0)
    assert "3 there" in capsys.readouterr().err and kept(tmp_path, asked) == found
    (tmp_path / "other").mkdir()
    run([sound], tmp_path / "other", limit_s=0.01)
    (late,) = kept(tmp_path / "other", [sound]).values()
    assert late.faults == ("failed: it had not ended after 0.01 s",)
    told = page(found)
    assert "| all | 3 | 1 | 2 | 2 | 1 | 1 | 0 | 0 | 0 |" in told
    assert f"{slow.name}: waits for gradients, as its store says" in told


def test_all_plans_that_are_to_equal_one_process_are_there() -> None:
    names = [entry.name for entry in entries()]
    assert len(names) == len({*names})
    listed = [entry.kind for entry in entries() if entry.group == LISTED]
    assert listed == 4 * [*PLANS, *LATE]


@pytest.mark.skipif(not os.environ.get(ALL_CASES), reason="in `make test-all`: minutes")
@pytest.mark.parametrize(("kernels", "precision"), [(False, "fp32"), (True, "bf16")])
@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_no_plan_that_equals_one_process_waits(
    model: str, kernels: bool, precision: str, tmp_path: Path
) -> None:
    setting = Setting(model, precision, kernels)
    asked = [x for x in entries() if (x.group, x.setting) == (LISTED, setting)]
    run(asked, tmp_path, limit_s=200)
    found = kept(tmp_path, asked)
    assert set(found) == set(asked) and len(found) == len(PLANS) + len(LATE)
    assert not {entry.name: x.faults or x.refused for entry, x in found.items() if not x.sound}

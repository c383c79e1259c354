"""A run takes all its steps, and numbers them as they are, also when it goes back."""

import json

from meshwright.ir.plan import plan_io
from meshwright.running.launch import SavingChoice, train
from meshwright.testing.nets import Net, plan_for

STEPS = 7
TRAIN = """
import torch
from meshwright.testing.nets import Net, data as batch

def model():
    return Net(), batch(0)

def data():
    for number in range(100):
        made = batch(number)
        if number == 5:
            made[0].fill_(float("nan"))
        yield made
"""


def test_a_run_that_goes_back_takes_all_its_steps(tmp_path, monkeypatch, capfd):
    (tmp_path / "back_train.py").write_text(TRAIN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("MESHWRIGHT_CHECK", "0")
    plan = plan_for(Net)
    plan_io.save(plan, tmp_path / "plan.json")
    train(
        tmp_path / "plan.json", "back_train:model", steps=STEPS, data="back_train:data",
        learning_rate=0.1, output=tmp_path / "run", trace=False, as_json=True, log="jsonl",
        saving=SavingChoice(tmp_path / "saved", "3"), on_nonfinite="back",
    )  # fmt: skip
    out, said = capfd.readouterr()
    assert "Going back to step 3, without that batch" in said and "the data ended" not in said
    taken = [1, 2, 3, 4, 5, 4, 5, 6, 7]
    rows = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == taken
    shown = [json.loads(row)["step"] for row in out.splitlines()]
    assert shown == [step - 1 for step in taken]
    latest = (tmp_path / "saved/latest").read_text().strip()
    manifest = json.loads((tmp_path / "saved" / latest / "checkpoint.json").read_text())
    assert latest == "step-00000007"
    assert manifest["content"]["extra"]["samples"] == 10 * plan.global_batch_size

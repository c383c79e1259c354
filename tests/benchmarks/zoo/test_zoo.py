"""A fast slice of the model zoo: models that need what the older tests do not have."""

import pytest

from benchmarks.zoo.entry import Entry
from benchmarks.zoo.main import ENTRIES
from benchmarks.zoo.run import attempt
from tests.benchmarks.zoo.custom import OWN

SLICE = ("straight_through", "assigned_buffer", "queue", "graph_one", "unet")
PINS = ("pp=1", "tp=2")


@pytest.mark.sampled
@pytest.mark.parametrize("entry", [*(ENTRIES[name] for name in SLICE), OWN], ids=lambda e: e.name)
def test_model_trains_as_in_one_process(entry: Entry, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path))
    tried = attempt(entry, constraints=PINS)
    assert tried.passed and tried.ranks == 4, str(tried)


def test_what_cannot_be_planned_says_why() -> None:
    tried = attempt(ENTRIES["jetmoe"])
    assert not tried.passed and tried.step == "trace"
    assert "needs the values of a tensor" in tried.reason and "modeling_jetmoe.py" in tried.reason

"""Steps of the day fit its budget, find their plans, and call what is there."""

import inspect
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.planned import planned, prepare
from benchmarks.gpu.recipe import Recipe
from benchmarks.gpu.step import BUDGET_S, Fact, Place, Step, checked, each_in_time, load_steps
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.errors import PlanError
from meshwright.testing.fresh import python

HERE = Path(__file__).parents[3] / "benchmarks" / "gpu"


def test_steps_of_one_device_fit_the_budget():
    steps = load_steps()
    assert sum(step.limit_s for step in steps if step.gpus < 2) < BUDGET_S < 570
    assert all(step.does and step.least_s <= step.limit_s for step in steps)


def test_a_step_without_a_sound_limit_is_refused():
    with pytest.raises(PlanError, match="0 < least_s <= limit_s <= 565"):
        Step(name="x", does="", order=1, limit_s=1, least_s=2, run=lambda place: iter(()))


@pytest.mark.parametrize(
    "fact", [("a/b/c", 1), ("", 1), ("x", float("inf")), ("x", [1]), "x", ("\n", 1)]
)
def test_facts_that_cannot_be_kept_are_refused(fact):
    with pytest.raises(PlanError):
        checked(fact)


def test_texts_are_cleaned_and_cut():
    assert checked(("x", "\x1b[2J" + "a" * 9999)) == ("x", " [2J" + "a" * 1996)


def test_names_of_cuda_that_only_the_day_calls_are_there():
    sources = "".join(path.read_text() for path in HERE.rglob("*.py"))
    names = set(re.findall(r"torch\.cuda\.([\w.]+)", sources))
    assert len(names) > 10
    for name in names:
        found = torch.cuda
        for part in name.split("."):
            found = getattr(found, part)
    testing = pytest.importorskip("triton.testing")
    inspect.signature(testing.do_bench).bind(print, warmup=10, rep=40, return_mode="median")


def test_the_runner_starts_where_packages_are_missing():
    """Of them it says so, step by step; it needs none itself."""
    done = python("-c", """
import sys
for name in ("torch", "pydantic", "ortools", "transformers", "rich", "triton"):
    sys.modules[name] = None
from benchmarks.gpu.main import main
try:
    main(["--help"])
except SystemExit as error:
    assert error.code == 0
from benchmarks.gpu.step import load_steps
print(len(load_steps()), "steps")
""")  # fmt: skip
    assert f"{len(load_steps())} steps" in done.stdout, done.stderr


def test_a_plan_is_taken_from_the_folder_if_it_is_of_the_model_that_is_traced(tmp_path):
    recipe = Recipe(name="x", workload="gpt2-small")
    place = Place(out=tmp_path, device="cpu", rehearsal=True, plans=tmp_path / "plans",
                  until=time.monotonic() + 99)  # fmt: skip
    assert planned(place, recipe).origin == "searched here: none was prepared"
    # What cannot be on this device keeps nothing else from being prepared.
    graphs = replace(recipe, name="y", pins=("capture=true",))
    (_, other), (path, why) = prepare([graphs, recipe], [Cluster.local(1)], place.plans, tiny=True)
    assert path.is_file() and not why and "CUDA graphs are of GPUs" in other
    found = planned(place, recipe)
    assert found.origin == "prepared" and found.predicted.step_s > 0
    # One that a torch or transformers of another version has traced otherwise.
    other = planned(place, replace(recipe, dropout=0.1))
    assert other.origin.startswith("searched here: the model is another one")


def test_what_is_too_long_for_the_time_that_is_left_is_left_out(tmp_path):
    def one(recipe: Recipe) -> Iterator[Fact]:
        if recipe.name == "bad":
            raise ValueError("no")
        yield f"{recipe.name}/ran", True

    recipes = [Recipe(name=name, workload="") for name in ("good", "bad", "other")]
    place = Place(out=tmp_path, device="cpu", plans=tmp_path, until=time.monotonic() + 60)
    assert dict(each_in_time(place, recipes, 30, one)) == {
        "good/ran": True, "bad/error": "ValueError: no", "other/ran": True,
    }  # fmt: skip
    late = dict(each_in_time(place, recipes, 90, one))
    assert all(key.endswith("/error") and "left out" in str(why) for key, why in late.items())
    assert len(late) == len(recipes)

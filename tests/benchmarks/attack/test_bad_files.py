"""Every command on files that are spoiled: an answer in words, whatever they hold."""

import json
import os
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.attack.files import attack
from benchmarks.attack.files_bases import Bases, make_bases, sound
from benchmarks.attack.files_commands import command
from meshwright.arguments.targets import load_callable, load_target
from meshwright.ir.errors import PlanError
from meshwright.ir.plan import plan_io
from meshwright.ir.profile.profile_store import load_profile
from tests.injection import plain

FRESH = int(os.environ.get("MESHWRIGHT_FUZZ_SEED", int.from_bytes(os.urandom(4))))
"""What fails with it is made again with this seed in the environment."""
COUNT = 60


@pytest.fixture(scope="module")
def bases(tmp_path_factory) -> Bases:
    return make_bases(tmp_path_factory.mktemp("bases"))


def test_sound_files_are_read_by_every_command(bases):
    for arguments in sound(bases):
        done = command(*arguments)
        assert (done.code, done.problem) == (0, ""), f"{arguments}: {done.text}"


@pytest.mark.parametrize("seed", [1, FRESH], ids=["fixed", "fresh"])
def test_spoiled_files_are_right_or_refused(bases, tmp_path, seed):
    failed = [r for n in range(COUNT) if not (r := attack(bases, tmp_path, seed, n)).held]
    told = "\n".join(f"{result.name}: {result.what}" for result in failed)
    assert not failed, f"MESHWRIGHT_FUZZ_SEED={seed}\n{told}"


def _edited(bases: Bases, path: tuple[Any, ...], value: Any, folder: Path) -> str:
    """A plan file with another value in one place, and its right hash."""
    data = plain(plan_io.load(bases.plans[0]))
    parent = data
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = value
    plan = plan_io.loads(json.dumps(data), check_hash=False)
    plan_io.save(plan, folder / "edited.json")
    return str(folder / "edited.json")


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (("predicted", "stages"), [], "the prediction is for another plan: 0 stages for 2"),
        (("predicted", "breakdown", "rank"), 7, "breakdown is of pipeline rank 7"),
        (("predicted", "detail", "stages"), [5, 5], "detail names kind 5 of stages"),
        (("predicted", "detail", "ranks"), [], "detail has 0 pipeline ranks"),
        (("predicted", "detail", "devices"), [], "the plan uses device 3"),
        (("predicted", "detail", "ranks", 0, "seconds"), {"x": 1.0}, "has seconds of 'x'"),
        (("predicted", "detail", "kinds", 0, "rises"), {}, "how memory rises in F"),
        (("predicted", "detail", "kinds", 0, "actions"), {"F": 1.0}, "no seconds of B"),
        (("predicted", "detail", "kinds", 0, "actions", "X"), 1.0, "has seconds of 'X'"),
        (("stages", 0, "layouts", "transformer.h.*"), "nothing", "which does not exist"),
        (("schedule", "rows"), ["0F0 0B0", "1B0 1F0"], "deadlocks"),
        (("stages", 0, "mesh"), {"tp": 1}, "mesh {'tp': 1} needs 1 devices"),
    ],
)
def test_a_plan_that_is_not_of_one_piece_is_refused_by_what_is_wrong(
    bases, tmp_path, path, value, says
):
    """By every command that would reckon with it; `show` shows what there is."""
    file, page = _edited(bases, path, value, tmp_path), str(tmp_path / "page.html")
    for arguments in (
        ("check", file), ("explain", file), ("report", file, "-o", page),
        ("diff", file, str(bases.plans[1])), ("compare", file, str(bases.run)),
        ("export", file, "--to", "slurm"),
    ):  # fmt: skip
        done = command(*arguments)
        assert not done.problem and (done.code == 4 or arguments[0] == "compare"), done.text
        assert says in done.text or arguments[0] == "compare", f"{arguments}: {done.text}"
    assert not command("show", file).problem


@pytest.mark.parametrize(
    ("statement", "says"),
    [
        ("CREATE VIEW v AS SELECT 1", "it has 'view' 'v'"),
        ("CREATE TRIGGER t AFTER INSERT ON ops BEGIN DELETE FROM ops; END", "it has 'trigger'"),
        ("CREATE TABLE other (x)", "it has 'table' 'other'"),
        ("ALTER TABLE ops RENAME COLUMN key TO x", "table ops has other columns"),
        ("UPDATE ops SET inputs = '[[1], null]'", "in a list of shapes"),
        ("UPDATE ops SET inputs = '[['", "Expecting value"),
        ("UPDATE ops SET forward_median_s = -1.0", "median_s is -1.0; it must be between"),
        ("UPDATE ops SET target = 'a' || char(27) || 'b'", r"has the character U\+001B"),
        ("UPDATE collectives SET group_size = 0", "group.size is 0"),
        ("UPDATE ops SET op_class = 'x'", "OpRecord.op_class is 'x', none of matmul"),
        ("UPDATE machines SET kind = 'tpu'", "Machine.kind is 'tpu', none of cuda, cpu"),
        ("UPDATE blocks SET pattern = x'ff'", "which is no text"),
    ],
)
def test_profiles(bases, tmp_path, statement, says):
    path = tmp_path / "p.db"
    path.write_bytes(bases.profile.read_bytes())
    connection = sqlite3.connect(path)
    with connection:
        connection.execute(statement)
    connection.close()
    with pytest.raises(PlanError, match=says):
        load_profile(path)


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("hf:LLamaConfig", "nearest is 'LlamaConfig'"),
        ('hf:GPT2Config{"n_layerz": 3}', "no setting 'n_layerz'; nearest is 'n_layer'"),
        ('hf:GPT2Config{"n_layer": 1000000000}', "it must be 0 to 20,000"),
        ('hf:GPT2Config{"n_layer": "many"}', "transformers refuses these settings"),
        ('hf:GPT2Config{"n_embd": 0}', "refuses a model of these settings: ZeroDivisionError"),
        ('hf:GPT2Config{"activation_function": "zork"}', "KeyError: 'zork'"),
        ('hf:GPT2Config{"n_layer": 1, "n_layer": 2}', "appears twice"),
        ("hf:GPT2Config[]", "neither module:callable nor hf:"),
        ("train.py:build", "'train.py' is a file, its module is 'train': write train:build"),
        ("./a/b.py:build", "its module is 'a.b': write a.b:build"),
        ("json:dunps", "module json has no callable 'dunps'; nearest is 'dumps'"),
        ("no_such_module:build", "No module named 'no_such_module'"),
        ("os:getcwd", r"returned \(str\); it must return a torch.nn.Module"),
    ],
)
def test_targets(target, says):
    with pytest.raises(PlanError, match=says):
        load_target(target, meta=True)


def test_settings_that_only_the_models_code_reads_are_taken():
    """`rope_theta` is no field of the configuration today, but its code reads it."""
    small = '"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 8'
    found = load_target(f'hf:LlamaConfig{{"rope_theta": 5e5, "intermediate_size": 8, {small}}}')
    assert found.model.config.num_hidden_layers == 1


def test_what_the_users_own_code_raises_is_the_users_to_see(tmp_path, monkeypatch):
    (tmp_path / "mine_bad.py").write_text("def build():\n    return [].missing\n")
    (tmp_path / "mine_import.py").write_text("import nothing_of_that_name\n")
    (tmp_path / "mine_lookup.py").write_text("import os\nos.nothing\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(AttributeError, match="missing"):
        load_target("mine_bad:build")
    with pytest.raises(ModuleNotFoundError, match="nothing_of_that_name"):
        load_callable("mine_import:build", "--data")
    with pytest.raises(AttributeError, match="nothing"):
        load_target("mine_lookup:build")


def test_a_run_of_fewer_ranks_is_another_run(bases, tmp_path):
    whole = plan_io.load(bases.plans[0])
    file = tmp_path / "plan.json"
    plan_io.save(replace(whole, max_grad_norm=3.0), file)
    assert command("compare", str(file), str(bases.run)).code == 5

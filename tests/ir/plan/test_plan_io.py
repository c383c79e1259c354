"""A plan file says one thing in one way, and a doubtful one is refused."""

import json
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest

from meshwright.ir.errors import PlanError
from meshwright.ir.graph.graph import Fusion, Missed
from meshwright.ir.graph.routing import Routing
from meshwright.ir.plan import plan_io
from meshwright.ir.plan.plan import FormChoice, Plan
from meshwright.ir.plan.predicted import Evidence
from meshwright.ir.text.canonical import format_json
from tests.ir.plans import plan


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan().save(path)
    read = Plan.load(path)
    assert read == plan_io.rehash(plan())
    assert plan_io.dumps(read) == path.read_text()
    assert replace(read, hash="", seal="") == plan()


def test_text_is_canonical() -> None:
    one = plan()
    stage = replace(one.stages[0], saved={"h.*": {"a": "recompute", "b/*": "offload"}})
    one = replace(one, stages=(stage, one.stages[1]))
    mesh = dict(reversed(stage.mesh.items()))
    layouts = dict(reversed(stage.layouts.items()))
    saved = {"h.*": dict(reversed(stage.saved["h.*"].items()))}
    changed = replace(stage, mesh=mesh, layouts=layouts, saved=saved)
    other = replace(one, stages=(changed, one.stages[1]))
    assert other == one
    assert plan_io.dumps(other) == plan_io.dumps(one)
    assert '"mesh": {"dp_replicate": 3, "dp_shard": 1, "tp": 1}' in plan_io.dumps(other)


def test_one_change_is_one_line_the_hash_and_the_seal() -> None:
    one = plan_io.dumps(plan()).splitlines()
    other = plan_io.dumps(plan(optimizer="sgd")).splitlines()
    changed = [a for a, b in zip(one, other, strict=True) if a != b]
    assert [line.split(":")[0].strip() for line in changed] == ['"optimizer"', '"hash"', '"seal"']


def edited(**changes: object) -> str:
    return json.dumps({**json.loads(plan_io.dumps(plan())), **changes})


@pytest.mark.parametrize(
    "text,says",
    [
        (plan_io.dumps(plan())[:700], "ends too early"),
        ("", "line 1 column 1"),
        (edited(global_batch_size=float("nan")), "NaN is not a number"),
        (edited(global_batch_size=float("inf")), "Infinity is not a number"),
        (edited().replace("1.25", "1e999"), "beyond the range"),
        (edited().replace('"step_s": 1.25', '"step_s": ' + "9" * 500), "500 digits"),
        (edited().replace("{", '{"hash": "x", ', 1), "'hash' appears twice"),
        (edited(num_microbatch=2), "num_microbatch: no such key; nearest is 'num_microbatches'"),
        (edited(num_microbatches="2"), "num_microbatches: Input should be a valid integer"),
        (edited(precision="fp8"), "precision 'fp8' is none; nearest is 'fp"),
        (edited(schema="meshwright.plan/9.0"), "schema is 'meshwright.plan/9.0'"),
        (edited(schema="meshwright.plan/1.0"), "are not converted: make it again"),
        (edited(schema="meshwright.measured/1"), "this version reads 'meshwright.plan/2.1'"),
        ('{"tp": 4}', "A plan by hand is made whole by `meshwright check plan --model"),
        (edited(stages=None), "stages"),
        ("[" * 100_000, "nested too deeply"),
        (
            '{"schema": "meshwright.plan/2.0", "stages": ' + "[" * 400 + "]" * 400 + "}",
            "more than 40 deep",
        ),
        ("[1, 2]", "schema is None"),
        (edited(schema={"a": 1}), "schema is"),
        (edited(optimizer="\ud800"), "has the character U+D800"),
    ],
)
def test_refuses(text: str, says: str) -> None:
    with pytest.raises(PlanError) as error:
        plan_io.loads(text)
    assert says in str(error.value)


def test_edited_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(edited(optimizer="sgd"))
    with pytest.raises(PlanError, match=r"meshwright check .*plan.json --rehash"):
        plan_io.load(path)
    plan_io.save(plan_io.load(path, check_hash=False), path)
    assert plan_io.load(path).optimizer == "sgd"


def test_the_hash_covers_what_a_plan_does() -> None:
    first = plan_io.rehash(evident(10))
    second = plan_io.rehash(evident(11))
    assert first.hash == second.hash and first.seal != second.seal
    noted = replace(first, notes=("seen",), versions={"torch": "9"}, predicted=None)
    assert plan_io.content_hash(noted) == first.hash
    assert plan_io.content_hash(replace(first, optimizer="sgd")) != first.hash
    assert plan_io.content_hash(replace(first, num_microbatches=1)) != first.hash


def evident(candidates: int) -> Plan:
    found = Evidence(
        searcher="ilp", seed=0, candidates=candidates, infeasible=0, exhausted=False, bound_s=1.0,
        gap=0.0,
    )  # fmt: skip
    return replace(plan(), evidence=found)


@pytest.mark.parametrize("key", ["candidates", "seal"])
def test_edited_evidence_is_seen(key: str) -> None:
    data = json.loads(plan_io.dumps(evident(10)))
    if key == "seal":
        data["seal"] = ""
    else:
        data["evidence"]["candidates"] = 99
    with pytest.raises(PlanError, match="no seal" if key == "seal" else "the seal .* is not that"):
        plan_io.loads(format_json(data))
    again = plan_io.rehash(plan_io.loads(format_json(data), check_hash=False))
    assert plan_io.loads(plan_io.dumps(again)) == again


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot be read"):
        plan_io.load(tmp_path / "absent.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlanError, match="not UTF-8"):
        plan_io.load(tmp_path / "binary.json")


def test_schema_names_every_field_and_forbids_others() -> None:
    schema = plan_io.json_schema()
    assert schema["additionalProperties"] is False
    fusion = Fusion("swiglu", 2, (Missed("h.*.mlp", "its silu is read elsewhere too", 1),))
    whole = replace(
        plan(), kernels=(fusion,), gives_up=("dasgd: averages arrive late",),
        method=FormChoice(form="admm", settings={"stale": 1}), style="megatron",
        routing=(Routing(experts=8, picked=2),),
    )  # fmt: skip
    assert set(json.loads(plan_io.dumps(whole))) == set(schema["properties"])
    assert plan_io.loads(plan_io.dumps(whole)).kernels == (fusion,)


def test_a_plan_of_an_older_version_has_the_defaults_of_keys_that_it_lacks() -> None:
    now = plan_io.rehash(plan())
    data = {**json.loads(plan_io.dumps(now)), "hash": ""}
    del data["max_grad_norm"], data["seal"]  # older ones had none, and a hash of everything
    data["hash"] = sha256(format_json(data).encode()).hexdigest()
    assert data["hash"] != now.hash
    assert plan_io.loads(format_json(data)) == now
    with pytest.raises(PlanError, match="edited or damaged"):
        plan_io.loads(format_json({**data, "num_microbatches": data["num_microbatches"] + 1}))


def test_a_plan_of_the_schema_before_keeps_what_it_computes_in() -> None:
    older = replace(plan(), schema="meshwright.plan/2.0", precision="bf16")
    read = plan_io.loads(plan_io.dumps(older))
    assert (read.schema, read.precision) == (plan_io.SCHEMA, "bf16-autocast")
    assert plan_io.loads(plan_io.dumps(read)) == read
    with pytest.raises(PlanError, match="was edited or damaged"):
        plan_io.loads(plan_io.dumps(older).replace('"bf16"', '"fp32"'))

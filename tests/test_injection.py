"""Nothing of a plan becomes code of a shell, YAML, Python, a page or a terminal."""

import ast
import json
import os
import shutil
import subprocess
from dataclasses import is_dataclass, replace
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from meshwright.codegen.emit.emit import stage_source
from meshwright.codegen.lower import lower as lowering
from meshwright.codegen.lower.lower import lower
from meshwright.ir.errors import PlanError, TraceError
from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan import plan_io
from meshwright.ir.plan.plan import Plan
from meshwright.ir.plan.show import printed, to_text
from meshwright.ir.text.plain_text import comment, docstring, odd_character, quoted
from meshwright.ir.trace.trace import trace
from meshwright.tools.diff.show import PlanDifference
from meshwright.tools.diff.show import render as render_diff
from meshwright.tools.export.export import TARGETS, export
from meshwright.tools.report.page import html
from tests.codegen import mlp
from tests.exporters.plans import CLUSTER, CONFIG, uniform
from tests.injection import MARK, READ, REFUSED, plain, spoiled, text_places, with_text
from tests.tools.report.plans import piped

SHELLS, YAMLS = ("torchrun", "slurm", "megatron"), ("accelerate", "kubeflow", "skypilot")
STUBS = {"torchrun": 'printf "%s\\n" "$@"', "scontrol": "echo host0",
         "srun": 'shift; export SLURM_NNODES=2 SLURM_NODEID=1; exec "$@"'}  # fmt: skip


def small() -> Plan:
    """A plan with a text in every kind of field, and few of each."""
    plan = piped(2, 2, 4, 2)
    stages = (replace(plan.stages[0], saved={"h.*": {"a/b": "recompute"}}), *plan.stages[1:])
    return replace(plan, stages=stages, constraints=("tp=1",), versions={"torch": "2"})


def test_a_file_with_such_a_text_is_refused_by_its_path():
    data = plain(small())
    places = list(text_places(data))
    assert len(places) > 150
    for number, (path, as_key) in enumerate(places):
        text = REFUSED[number % len(REFUSED)]
        bad = json.dumps(with_text(data, path, text, as_key=as_key))
        with pytest.raises(PlanError, match="has the character U\\+") as error:
            plan_io.loads(bad, check_hash=False)
        where = ".".join(map(str, path[:-1] if as_key else path))
        assert f"{where} is" in str(error.value) and not odd_character(str(error.value))


def test_texts_that_go_on_and_on_are_refused():
    data = with_text(plain(small()), ("model", "name"), "x" * 10_001, as_key=False)
    with pytest.raises(PlanError, match=r"model.name is a text of 10001 characters"):
        plan_io.loads(json.dumps(data))


def test_a_plan_made_in_python_with_such_a_text_is_not_written(tmp_path):
    plan = small()
    bad = replace(plan, model=replace(plan.model, name="a\nb"))
    with pytest.raises(PlanError, match=r"cannot be written: model.name"):
        bad.save(tmp_path / "plan.json")
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def exported() -> dict[str, dict[str, str]]:
    """Target -> distinct texts of its file, with where the harm was; the first is of none."""
    found: dict[str, dict[str, str]] = {target: {} for target in TARGETS}
    plan = uniform()
    few = replace(plan, layouts=tuple(replace(x, ops={}, parameters={}) for x in plan.layouts))
    for where, bad in (("nothing", plan), *spoiled(few, (*READ, *REFUSED), 2)):
        if bad.cluster.fingerprint != plan.cluster.fingerprint:
            continue
        for target in TARGETS:
            text = export(bad, target, CLUSTER, config=CONFIG).text
            found[target].setdefault(text, where)
    assert all(len(texts) > len(READ) for target, texts in found.items() if target != "deepspeed")
    return found


@pytest.mark.parametrize("target", SHELLS)
def test_shells_run_the_same_whatever_a_plan_says(target, exported, tmp_path):
    for name, body in STUBS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    work = tmp_path / "work"
    work.mkdir()
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "host0",
           "NODE_RANK": "0", "MASTER_ADDR": "host0"}  # fmt: skip
    done, scripts = {}, []
    for number, (text, where) in enumerate(exported[target].items()):
        script = tmp_path / f"{number}.sh"
        show = '\nprintf "%s\\n" "${MEGATRON_ARGS[@]}"\n' * (target == "megatron")
        script.write_text(text + show)
        scripts.append((where, script))
    for where, script in scripts:
        ran = subprocess.run(["bash", str(script)], env=env, cwd=work, capture_output=True)
        assert not ran.returncode, f"{where}: {ran.stderr.decode()}"
        done[where] = ran.stdout
    assert done["nothing"] and not any(MARK.encode() in said for said in done.values())
    if target != "megatron":  # whose flags say whether layers are recomputed, for example
        assert set(done.values()) == {done["nothing"]}
    assert not list(work.iterdir())
    if target == "slurm":  # directives are read by sbatch, not by bash
        names = {where: [x for x in text.split("\n") if x.startswith("#SBATCH")]
                 for text, where in exported[target].items()}  # fmt: skip
        assert {len(found) for found in names.values()} == {len(names["nothing"])}
        own = {x for found in names.values() for x in found if "--job-name" not in x}
        assert own == {x for x in names["nothing"] if "--job-name" not in x}


@pytest.mark.parametrize("target", YAMLS)
def test_yaml_has_the_same_keys_whatever_a_plan_says(target, exported):
    def shape(data: Any) -> Any:
        if isinstance(data, dict):
            return {key: shape(item) for key, item in data.items() if key != "name"}
        return data

    shapes = [shape(yaml.safe_load(text)) for text in exported[target]]
    assert len({tuple(shape) for shape in shapes}) == 1
    assert not any(MARK in json.dumps(shape) for shape in shapes)


def masked(source: str) -> str:
    """The structure of Python code: without the texts in it."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = ""
    return ast.dump(tree)


def test_torchtitans_python_is_the_same_whatever_a_plan_says(exported):
    """But for what depends on the plan, such as the recomputation of layers."""
    for text, where in exported["torchtitan"].items():
        assert MARK not in masked(text), where
        said, *rest = ast.parse(text).body
        assert isinstance(said, ast.Expr) and MARK not in ast.dump(ast.Module(rest, [])), where
        assert {type(node) for node in rest} == {ast.ImportFrom, ast.FunctionDef}, where


def test_deepspeeds_json_is_the_same_whatever_a_plan_says(exported):
    kept = [{k: v for k, v in json.loads(text).items() if k != "optimizer"}
            for text in exported["deepspeed"]]  # fmt: skip
    assert all(one == kept[0] for one in kept)


def test_emitted_python_is_the_same_whatever_its_names(monkeypatch):
    """Every text that goes into a stage's source, one at a time."""
    given: list[Any] = []

    def kept(program: Any, at: Any) -> str:
        given[:] = [program, at]
        return stage_source(program, at)

    monkeypatch.setattr(lowering, "stage_source", kept)
    plan = mlp.plan(replace(
        mlp.stage("h.0", "head", (0, 1), (8,), 2, recompute="none"),
        saved={"h.*": {"act/relu": "recompute"}},
    ))  # fmt: skip
    source = lower(mlp.graph(), plan, 1)[0].source
    assert "recompute what" in source
    program, at = given
    tried = 0
    for bad_program, bad_at in _spoiled_program(program, at):
        tried += 1
        assert masked(stage_source(bad_program, bad_at)) == masked(source)
    assert tried > 100


def _spoiled_program(program: Any, at: Any):
    stages = at.plan.stages
    for text in (*READ, *REFUSED):
        for field in ("first", "last"):
            spoiled_stage = replace(stages[at.stage], **{field: text})
            yield program, replace(at, plan=replace(at.plan, stages=(spoiled_stage,)))
        yield program, replace(at, plan=replace(at.plan, hash=text))
        call = program.calls[0]
        for changed in (
            replace(call, block=text),
            replace(call, saved={text: "recompute"}),
            replace(call, params=(text, *call.params[1:])),
            replace(call, inputs=(text, *call.inputs[1:])),
            replace(call, outputs=(text, *call.outputs[1:])),
        ):
            yield replace(program, calls=(changed, *program.calls[1:])), at
        nodes = [node for node in call.code.module.graph.nodes if "comment" in node.meta]
        said = nodes[0].meta["comment"]
        nodes[0].meta["comment"] = f"{text} ({'x, ' * 60})"
        yield program, at
        nodes[0].meta["comment"] = said


class Odd(nn.Module):
    """Modules of names that no Python file can have, also such as Python keeps for itself."""

    NAMES = ('"""; import os; """', "class", "0", "a b(c, " * 20, "$(touch x)", "# z", "[/red]")

    def __init__(self, names: tuple[str, ...] = NAMES) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Sequential(nn.Linear(4, 4)) for name in names})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = x + layer(x).relu()
        return x.square().mean()


def _traced(model: nn.Module) -> Graph:
    return trace(model, {"x": torch.randn(4, 4)})


def test_names_of_modules_reach_plans_sources_and_terminals_as_texts(tmp_path):
    from meshwright.ir.cluster.cluster import Cluster
    from meshwright.planner.search.search import search
    from meshwright.runtime.job.compile import compile as compile_job

    plan = search(_traced(Odd()), Cluster.local(1), precision="fp32", progress=False,
                  time_limit_s=5.0, constraints=("recompute=none",))  # fmt: skip
    again = plan_io.loads(plan_io.dumps(plan))
    assert "[/red]" in to_text(again) and not odd_character(to_text(again).replace("\n", ""))
    (program,) = lower(_traced(Odd()), plan, 0)
    tree = ast.parse(program.source)
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert len(functions) > 2
    imports = [n for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom)]
    assert len(imports) == 2
    job = compile_job(Odd(), plan, example_inputs={"x": torch.randn(4, 4)}, lr=0.1)
    assert job.step({"x": torch.randn(4, 4)}) >= 0
    job.close()


def test_a_model_whose_names_end_lines_is_refused():
    with pytest.raises(TraceError, match=r"has the character U\+000A; give it another name"):
        _traced(Odd(("a\nimport os",)))
    kind = type("Odd\nimport os", (Odd,), {})
    assert _traced(kind()).meta["model"] == "Odd\\nimport os"


def test_terminals_get_text_only():
    for where, bad in spoiled(small(), (f"[/red]{MARK}\x1b[2J", f"[link={MARK}]:smile:\x9b\u202e")):
        try:
            text = to_text(bad)
        except PlanError:
            continue  # detail of devices that the plan has not
        assert not any(map(odd_character, text.split("\n"))), where
    table = render_diff(PlanDifference("[/a]", "\x1b[1m", "[/b]\x07", (), ()))
    assert "[/b]" in printed(table) and "\x07" not in printed(table)


def test_pages_hold_no_element_of_a_plan():
    sound = html(small())
    for where, bad in spoiled(small(), ("</script><script>x</script>", "<!--<script>", "\u2028")):
        try:
            page = html(bad)
        except PlanError:
            continue
        for sign in ("<script", "</script", "<!--", "<img"):
            assert page.count(sign) == sound.count(sign), where


@pytest.mark.parametrize("text", [*READ, *REFUSED])
def test_nothing_ends_a_comment_a_docstring_or_a_text(text):
    assert ast.literal_eval(quoted(text)) == text
    assert not odd_character(quoted(text)) and not odd_character(comment(text))
    tree = ast.parse(f"{docstring(text, '', text)}\n{comment(text)}\nx = {quoted(text)}\n")
    assert len(tree.body) == 2 and isinstance(tree.body[0], ast.Expr)
    assert yaml.safe_load(f"{comment(text)}\na: 1\n") == {"a": 1}


def test_shell_is_there():
    assert shutil.which("bash"), "the scripts must really run"
    assert is_dataclass(Plan)

"""What is meant to be one file: files of other names, in folders of one's own, work whole."""

from pathlib import Path
from subprocess import CompletedProcess
from textwrap import dedent
from uuid import uuid4

from meshwright.ir.plan import plan_io
from meshwright.testing.fresh import python
from tests.exporters.plans import uniform

ROOT = Path(__file__).parent.parent
GPT2 = (
    'hf:GPT2Config{"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 64, "n_positions": 32, '
    '"bos_token_id": 0, "eos_token_id": 0}'
)


def run(*command: str, **folders: Path) -> CompletedProcess[str]:
    """A process of its own: folders are looked through once."""
    environment = {f"MESHWRIGHT_{name}": str(path) for name, path in folders.items()}
    return python(*command, **environment)


def name() -> str:
    return f"x{uuid4().hex[:8]}"


PRESET = '''
"""Nobody's accelerator."""

from meshwright.ir.cluster.device import OpCurve
from meshwright.ir.cluster.links import Network, link
from meshwright.ir.cluster.preset import Preset

PRESET = Preset(
    memory_gb=48, bandwidth_gb_s=1234, fp64=5, fp32=21, half=333, processors=99, cache_mb=33,
    matmul=OpCurve(share=0.77, floor_s=3e-6), reported="{name} 9000", accelerator="{name}-SKY",
    link=link("wire-{name}", 123, 5), network=Network(link("net-{name}", 7, 20), one_port=True),
)
'''


def test_a_preset(tmp_path: Path) -> None:
    """A cluster, a search with its price, the command line, exporters, YAML, and detecting it."""
    mine = name()
    (tmp_path / f"{mine}_pro.py").write_text(PRESET.format(name=mine))
    plan, key = tmp_path / "plan.json", f"{mine}-pro"
    (tmp_path / "cluster.yaml").write_text(
        f"name: own\nnodes: [{{count: 2, devices: {{{key}: 2}}, link: wire-{mine}}}]\n"
        f"between_nodes: net-{mine}\n"
    )
    done = run("-c", dedent(f"""
        from meshwright.cli import app
        from meshwright.ir.cluster import detect
        from meshwright.ir.plan import plan_io
        from meshwright.ir.cluster.cluster import Cluster
        from meshwright.costmodel.stage.offload import copy_s
        from meshwright.tools.export.export import TARGETS, export
        cluster = Cluster.preset({key!r}, num_nodes=2, devices_per_node=2)
        device = cluster.device(0)
        assert device.peak("float16") == 333e12 and device.memory_bytes == 48 * 2**30
        assert cluster.nodes[0].link.bandwidth_bytes_per_s == 123e9
        assert cluster.between_nodes.bandwidth_bytes_per_s == 3.5e9
        assert copy_s(device, 10**9) > 0
        seen = detect.Seen("a", "NVIDIA {mine} 9000", 47 * 2**30, 8, 99)
        assert detect.describe([seen]).device_types == (device,)
        assert Cluster.load({str(tmp_path / "cluster.yaml")!r}).device_types == (device,)
        arguments = ["search", {GPT2!r}, "-b", "8", "-o", {str(plan)!r}, "--pin", "pp=1"]
        app([*arguments, "-c", "{key}:2x2"], standalone_mode=False)
        plan = plan_io.load({str(plan)!r})
        assert plan.predicted.step_s > 0 and plan.cluster.fingerprint == cluster.fingerprint
        for target in TARGETS:
            assert export(plan, target, cluster).text
        app(["export", {str(plan)!r}, "--to", "skypilot"], standalone_mode=False)
    """), PRESETS=tmp_path)  # fmt: skip
    assert done.returncode == 0 and f"{mine}-SKY:2" in done.stdout, done.stderr
    # Without the folder nobody knows it, and the error names what there is.
    other = run("-c", f"from meshwright.ir.presets import device; device({key!r})")
    assert "PlanError: no preset" in other.stderr and "h100-sxm" in other.stderr


def test_two_presets_that_disagree_are_refused(tmp_path: Path) -> None:
    (tmp_path / "l4.py").write_text(PRESET.format(name="z"))
    load = ("-c", "from meshwright.ir import presets")
    assert "a preset 'l4' is in" in run(*load, PRESETS=tmp_path).stderr
    (tmp_path / "l4.py").rename(tmp_path / "z.py")
    (tmp_path / "z.py").write_text(PRESET.replace("wire-{name}", "nvlink3").format(name="z"))
    assert "a link 'nvlink3' is described otherwise" in run(*load, PRESETS=tmp_path).stderr


COMMAND = '''
"""A command of one's own."""

from meshwright.ir.plan import plan_io
from meshwright.arguments.options import PlanFile

EXAMPLES = ("meshwright {name}-it plan.json",)


def command(plan_file: PlanFile) -> None:
    """Say how many ranks a plan is for."""
    print("ranks:", plan_io.load(plan_file).world_size)
'''


EXPORTER = '''
"""Nobody's launcher."""

from meshwright.tools.export.export import Exported, Request


def export(request: Request) -> Exported:
    return Exported(f"start {request.plan.world_size} of {name}", ("its schedule",))
'''


def test_a_command_and_an_exporter(tmp_path: Path) -> None:
    """Its help, a place in docs/cli.md, running it, and our errors as one line and a code; what a
    plan is in its words, and what it has none for."""
    mine, others = name(), tmp_path / "targets"
    others.mkdir()
    (others / f"{mine}.py").write_text(EXPORTER.replace("{name}", mine))
    (tmp_path / f"{mine}_it.py").write_text(COMMAND.format(name=mine))
    plan_io.save(uniform(), tmp_path / "plan.json")
    done = run("-c", dedent(f"""
        from docs.generate import DOCS, cli_page
        from meshwright.cli import app, main
        text = cli_page()
        assert "## `meshwright {mine}-it`" in text and "`meshwright {mine}-it plan.json`" in text
        assert text != (DOCS / "cli.md").read_text()
        app(["--help"], standalone_mode=False)
        app(["{mine}-it", {str(tmp_path / "plan.json")!r}], standalone_mode=False)
        app(["export", {str(tmp_path / "plan.json")!r}, "--to", "{mine}"], standalone_mode=False)
        main(lambda: app(["{mine}-it", "/no/such/plan.json"]))
    """), COMMANDS=tmp_path, EXPORTERS=others)  # fmt: skip
    said = " ".join(done.stdout.split())
    assert done.returncode == 4 and f"{mine}-it Say how many ranks" in said, done.stderr
    assert f"start {uniform().world_size} of {mine}" in said and "its schedule" in done.stderr
    assert f"ranks: {uniform().world_size}" in said and "PlanError: " in done.stderr


def test_a_command_of_a_known_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "show.py").write_text(COMMAND.format(name="x"))
    assert "a command 'show' is in" in run("-m", "meshwright", "show", COMMANDS=tmp_path).stderr


PIN = '''
"""Whether all blocks run again."""

from dataclasses import replace

from meshwright.ir.plan.finding import Finding
from meshwright.planner.pins.decision import Decision, Machinery


def _read(plan, stage):
    return "tight" if len(stage.recompute) >= len(stage.layouts) - 1 else "loose"


def _apply(stage, value, table):
    again = {pattern: "full" for pattern in stage.layouts if pattern != "(prelude)"}
    return replace(stage, recompute=again) if value == "tight" else stage


def _tight(plan):
    return all(_read(plan, stage) == "tight" for stage in plan.stages)


def _notes(problem, plan):
    if _tight(plan):
        yield "{name}: blocks of " + problem.cluster.name + " run again"


def _findings(plan):
    if _tight(plan):
        yield Finding("{name}", "everything runs again", "loose", "warning")


DECISION = Decision(
    words=("loose", "tight"), scope="plan", read=_read, apply=_apply, tries=("tight",),
    findings=_findings, notes=_notes, words_of=lambda plan: ["{name}"] * _tight(plan),
    kind=lambda stage: "{name}s" if _read(None, stage) == "tight" else "",
    mesh=lambda plan: "{name}m" if _tight(plan) else "",
    machinery=Machinery(-1, lambda plan: int(_tight(plan)), "{name}"),
    show=lambda stage: _read(None, stage),
)
'''


def test_a_pin(tmp_path: Path) -> None:
    """Given in Python, on the command line and in a plan by hand; refused if wrong; kept by the
    plan, where it is also said; in conflict with another; in a difference of plans; tried where
    nobody pins it, named, noted, weighed and warned of."""
    mine, plan, other = name(), tmp_path / "plan.json", tmp_path / "other.json"
    folder = tmp_path / "pins"
    folder.mkdir()
    (folder / f"{mine}.py").write_text(PIN.replace("{name}", mine))
    done = run("-c", dedent(f"""
        import json
        import pytest
        from meshwright.cli import app
        from meshwright.tools.diff.rows import structure
        from meshwright.ir.plan import plan_io
        from meshwright.ir.cluster.cluster import Cluster
        from meshwright.ir.errors import Infeasible, PlanError
        from dataclasses import replace
        from meshwright.ir.trace.trace import trace
        from meshwright.planner.problem.candidates import build_plan, uniform_choice
        from meshwright.planner.problem.problem import make_problem
        from meshwright.planner.search.complete import complete
        from meshwright.planner.search.finish import finished
        from meshwright.planner.search.found import SearchLog, simplest
        from meshwright.planner.search.plan_comparison import (
            alternative, kind_of, meshes_of, name_of,
        )
        from meshwright.planner.search.search import search
        from meshwright.arguments.targets import load_target
        given = load_target({GPT2!r}, meta=True)
        example, cluster = {{"example_inputs": given.example_inputs}}, Cluster.local(2)
        few = ["pp=1", "dp_shard=2", "zero=0", "num_microbatches=1", "saved=none"]
        def found(*pins):
            return search(given.model, cluster, constraints=(*few, *pins), global_batch_size=4,
                          precision="fp32", progress=False, **example)
        tight, loose = found("{mine}=tight"), found("{mine}=loose")
        assert all(stage.recompute for stage in tight.stages) and not loose.stages[0].recompute
        assert "{mine}=tight" in tight.constraints
        assert tight.predicted.step_s > loose.predicted.step_s
        rows = {{row.what: (row.first, row.second) for row in structure(tight, loose)}}
        assert rows["0: {mine}"] == ("tight", "loose")
        with pytest.raises(PlanError, match="nearest legal value is 'tight'"):
            found("{mine}=tigth")
        with pytest.raises(PlanError, match="nearest is '{mine}'"):
            found("{mine}x=tight")
        with pytest.raises(PlanError, match="decision of the whole plan"):
            found("stage 0 {mine}=tight")
        with pytest.raises(Infeasible, match="without '{mine}=tight': {mine}=loose"):
            found("{mine}=tight", "recompute=none")
        hand = {{"pp": 1, "dp_shard": 2, "zero": 0, "num_microbatches": 1, "saved": "none",
                 "precision": "fp32", "global_batch_size": 4, "{mine}": "tight"}}
        made = complete(hand, given.model, cluster, **example)
        assert made.hash == plan_io.loads(plan_io.dumps(made)).hash
        assert [s.recompute for s in made.stages] == [s.recompute for s in tight.stages]
        with pytest.raises(PlanError, match="nearest legal value is 'loose'"):
            complete(hand | {{"{mine}": "lose"}}, given.model, cluster, **example)
        pins = [word for pin in (*few, "{mine}=tight") for word in ("--pin", pin)]
        app(["search", {GPT2!r}, "-b", "4", "-c", "local:2", "--precision", "fp32", *pins,
             "-o", {str(plan)!r}], standalone_mode=False)
        written = plan_io.load({str(plan)!r})
        assert "{mine}=tight" in written.constraints and written.stages == tight.stages
        assert name_of(tight).split().count("{mine}") == meshes_of(tight).count("{mine}m") == 1
        assert kind_of(tight).endswith("{mine}s") and "{mine}" not in kind_of(loose)
        assert [note for note in tight.notes if note == "{mine}: blocks of local:2 run again"]
        plan_io.save(loose, {str(other)!r})
        for command in (["diff", {str(plan)!r}, {str(other)!r}], ["check", {str(plan)!r}],
                        ["explain", {str(plan)!r}], ["show", {str(plan)!r}]):
            print("<" + command[0] + ">")
            app(command, standalone_mode=False)
            print("</" + command[0] + ">")
        # Nobody pins it: it is tried on what has none of it, weighed against that, and named.
        graph = trace(given.model, given.example_inputs, global_batch_size=4)
        asked = make_problem(graph, cluster, constraints=few, precision="fp32")
        base = build_plan(asked, uniform_choice(asked, dp_shard=2, num_microbatches=1))
        made = [p for p in finished(asked, base) if kind_of(p).endswith("{mine}s")]
        assert len(made) == 1 and made[0].predicted.step_s > base.predicted.step_s
        pinned = make_problem(graph, cluster, constraints=(*few, "{mine}=loose"), precision="fp32")
        assert not [p for p in finished(pinned, base) if kind_of(p).endswith("{mine}s")]
        as_fast = replace(made[0], predicted=base.predicted)
        assert alternative(as_fast, base, 0).why == "as fast, but less simple: {mine} 1 against 0"
        log = SearchLog(best=as_fast, value=(0.0,))
        log.keep((0.0,), as_fast)
        log.keep((1e-9,), replace(base, predicted=base.predicted))
        assert simplest(asked, log).stages == base.stages
    """), PINS=folder)  # fmt: skip
    assert done.returncode == 0, done.stderr

    def said(command: str) -> str:
        _, _, rest = done.stdout.partition(f"<{command}>")
        return " ".join(rest.partition(f"</{command}>")[0].split())

    assert f"{mine}" in said("diff") and "tight" in said("diff") and "loose" in said("diff")
    assert "everything runs again" in said("check")
    assert f"{mine}: blocks of local:2 run again" in said("show") + said("explain")

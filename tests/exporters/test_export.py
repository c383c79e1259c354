"""Each target's file for one plan against the file kept here; those of ours that parse, parse."""

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import yaml

from meshwright.cli import app, main
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.errors import PlanError
from meshwright.ir.plan import plan_io
from meshwright.ir.plan.plan_io import rehash
from meshwright.planner.inside.layout_objective import usual
from meshwright.planner.inside.layouts import solve_layouts
from meshwright.planner.pins.constraints import placement_rules
from meshwright.planner.pins.decision_text import parse_constraint
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import make_problem
from meshwright.planner.search.search import search_problem
from meshwright.testing.models import CASES
from meshwright.tools.export.export import TARGETS, export, run_command
from meshwright.tools.export.export_shape import shape_of
from tests.codegen.quick import QUICK
from tests.exporters.plans import CLUSTER, CONFIG, looped, odd, replicas, uniform
from tests.traces import zoo_graph

GOLDEN = Path(__file__).parent / "golden"
LAUNCH = ("torchrun", "slurm", "kubeflow", "skypilot")


def exported(target, plan=None, **more):
    return export(plan or uniform(), target, CLUSTER, **{"config": CONFIG, **more})


@pytest.mark.parametrize("target", TARGETS)
def test_the_file_is_the_one_kept(target):
    """`python -m tests.exporters.test_export` writes them anew, to be read before they are kept."""
    plan = replace(uniform(), hash="0" * 64)
    assert exported(target, plan).text == (GOLDEN / f"{target}.txt").read_text()


@pytest.mark.parametrize("target", TARGETS)
def test_what_cannot_be_said_is_named(target):
    names = " / ".join(exported(target, odd()).missing)
    if target in LAUNCH:
        assert "meshes of their own" not in names
    else:
        assert "meshes of their own: dp_replicate 12 / dp_replicate 4" in names


def test_experts_along_a_sequence_are_told_of():
    graph = zoo_graph(CASES["mixtral"], 8)
    pins = "cp=2", "place *.experts.* cp=S(0)"
    for asked, lost in ((pins, True), (pins[:1], False)):
        problem = make_problem(
            graph, Cluster.local(2), precision="fp32",
            constraints=tuple(parse_constraint(pin) for pin in asked),
        )  # fmt: skip
        told = " / ".join(shape_of(search_problem(problem)).odd)
        assert ("experts along a sequence (cp): the ep of tools counts" in told) is lost, told


def test_tools_take_groups_of_experts_from_replicas():
    """Sizes make up the job: ranks of experts with samples of their own are replicas there; ranks
    that share samples, and experts on several axes, are told of."""
    graph = zoo_graph(CASES["mixtral"], 8)
    mesh = (("ep", 2), ("tp", 2))
    one, several = (f"place *.experts.* tp={p}" for p in ("R", "S(0,outer=2)"))
    for pins, apart, shard, lost in (
        ((one,), "ep", 4, ()),
        ((one,), "", 2, ("share each sample",)),
        ((several,), "ep", 4, ("experts that lie on several axes",)),
    ):
        problem = make_problem(graph, Cluster.local(8), precision="fp32", constraints=pins)
        asked = placement_rules(problem.constraints, graph)
        layouts = solve_layouts(graph, mesh, usual(mesh, QUICK), apart=apart, asked=asked,
                                split_borders=True)  # fmt: skip
        problem.keep_layouts(mesh, "", layouts)
        choice = uniform_choice(problem, model=mesh, dp_shard=2, zero=1)
        plan = rehash(build_plan(problem, choice, predict=False))
        shape = shape_of(plan)
        assert (shape.dp_shard, shape.samples) == (shard, 8 // shard), pins
        told = " / ".join(shape.odd)
        for words in ("share each sample", "experts that lie on several axes"):
            assert (words in told) is (words in lost), (pins, apart, told)
        text = export(plan, "torchtitan", problem.cluster, config=CONFIG).text
        assert f"data_parallel_shard_degree={shard}," in text
        assert "expert_parallel_degree=2," in text


@pytest.mark.parametrize(
    ("precision", "says", "lacks"),
    [
        ("bf16", {"megatron": "--bf16", "deepspeed": '"grad_accum_dtype": "fp32"',
                  "accelerate": "mixed_precision: bf16"}, {}),
        ("bf16-sums", {"megatron": "--grad-reduce-in-bf16", "accelerate": "mixed_precision: bf16"},
         dict.fromkeys(("torchtitan", "accelerate"),
                       "gradients that are summed in bfloat16: they are summed in float32")),
        ("fp16", {"megatron": "--fp16", "deepspeed": '"fp16"',
                  "accelerate": "mixed_precision: fp16"}, {"torchtitan": "precision fp16"}),
        ("fp64", {"accelerate": "mixed_precision: 'no'"},
         dict.fromkeys(("megatron", "deepspeed", "torchtitan", "accelerate"), "precision fp64")),
    ],
)  # fmt: skip
def test_precisions_are_said_or_named_as_lost(precision, says, lacks):
    for target in ("megatron", "deepspeed", "torchtitan", "accelerate"):
        found = exported(target, replace(uniform(), precision=precision))
        assert says.get(target, "") in found.text
        named = [m for m in found.missing if "precision" in m or "summed" in m]
        assert named == [lacks[x] for x in (target,) if x in lacks]


@pytest.mark.parametrize("target", TARGETS)
def test_files_hold_nothing_of_this_machine(target):
    for plan in (uniform(), replicas(), odd()):
        text = exported(target, plan).text
        assert str(Path.home()) not in text and str(Path.cwd()) not in text


def test_a_megatron_plan_is_said_whole_in_megatrons_flags():
    assert not [m for m in exported("megatron").missing if "on tp is" not in m]


@pytest.mark.parametrize("target", ("torchrun", "slurm", "megatron"))
def test_shell_scripts_parse(target):
    for plan in (uniform(), replicas()):
        text = exported(target, plan).text
        done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True)
        assert done.returncode == 0, done.stderr


def test_slurm_asks_for_no_signal_that_nothing_needs():
    """At the time limit Slurm itself sends SIGTERM: ranks of `meshwright run` end with it, and
    other scripts would only be stopped early."""
    assert "--signal" not in exported("slurm").text


def test_slurm_queues_a_job_again_that_was_asked_to_end(tmp_path):
    command = run_command(Path("p.json"), "train:model", None, Path("my checkpoints"))
    text = exported("slurm", command=command).text
    assert "#SBATCH --signal=B:USR1@120\n" in text and "#SBATCH --requeue\n" in text
    ranks = 'shift; trap "echo saved; exit 75" TERM; touch started; while :; do sleep 0.05; done'
    for name, body in (("srun", ranks), ("scontrol", 'echo "$@" >> told')):
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    job = subprocess.Popen(
        ["bash", "-c", text], text=True, stdout=subprocess.PIPE, cwd=tmp_path,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_NODELIST": "h", "SLURM_JOB_ID": "7"},
    )  # fmt: skip
    while not (tmp_path / "started").exists():
        assert job.poll() is None
        time.sleep(0.01)
    job.send_signal(signal.SIGUSR1)
    assert job.communicate(timeout=20)[0] == "saved\n" and job.returncode == 75
    assert (tmp_path / "told").read_text().splitlines()[-1] == "requeue 7"
    with pytest.raises(PlanError, match="--save"):
        run_command(Path("p.json"), None, "train.py", Path("c"))


def test_slurm_hands_the_command_on_as_it_is(tmp_path):
    text = exported("slurm", command=("-m", "meshwright", "run", "p.json", 'hf:X{"a": 1}')).text
    stubs = (
        ("srun", 'shift; export SLURM_NNODES=2 SLURM_NODEID=1; exec "$@"'),
        ("scontrol", "echo host0; echo host1"),
        ("torchrun", 'printf "%s\\n" "$@"'),
    )
    for name, body in stubs:
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    done = subprocess.run(
        ["bash"], input=text, text=True, capture_output=True,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_NODELIST": "host[0-1]"},
    )  # fmt: skip
    words = done.stdout.splitlines()
    assert words[:6] == ["--nnodes", "2", "--nproc-per-node", "8", "--node-rank", "1"], done.stderr
    assert words[6:10] == ["--master-addr", "host0", "--master-port", "29500"]
    assert words[10:] == ["-m", "meshwright", "run", "p.json", 'hf:X{"a": 1}']


def test_launch_files_in_yaml_say_how_many():
    job = yaml.safe_load(exported("kubeflow").text)["spec"]["trainer"]
    assert (job["numNodes"], job["numProcPerNode"]) == (2, 8)
    task = yaml.safe_load(exported("skypilot").text)
    assert task["num_nodes"] == 2 and task["resources"]["accelerators"] == "A100-80GB:8"


def test_a_job_that_fills_part_of_a_node_or_nodes_unequally():
    whole = uniform()
    wide = Cluster.preset("a100-80", num_nodes=1, devices_per_node=32)
    narrow = Cluster.preset("a100-80", num_nodes=2, devices_per_node=12)

    def on(cluster):
        identity = replace(whole.cluster, name=cluster.name, fingerprint=cluster.fingerprint)
        return export(replace(whole, cluster=identity), "torchrun", cluster)

    assert "--nnodes 1 --nproc-per-node 16" in on(wide).text and "--standalone" in on(wide).text
    assert "nodes of different size (12, 4 ranks)" in on(narrow).missing[0]


def test_torchtitan_can_run_it(monkeypatch):
    given = {}
    modules = {
        "torchtitan": {}, "torchtitan.config": {}, "torchtitan.distributed": {},
        "torchtitan.config.parallelism": {"ParallelismConfig": given.update},
        "torchtitan.distributed.activation_checkpoint": {"FullActivationRematConfig": dict},
        "torchtitan.trainer": {"Trainer": SimpleNamespace(Config=object)},
    }  # fmt: skip
    for name, content in modules.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    scope: dict[str, object] = {}
    exec(compile(exported("torchtitan").text, "titan.py", "exec"), scope)
    config = scope["with_plan"](SimpleNamespace(training=SimpleNamespace()))
    assert given["pipeline_parallel_module_fqns_per_model_part"] == [
        ["tok_embeddings", "layers.0", "layers.1"], ["layers.2", "layers.3", "norm", "lm_head"],
    ]  # fmt: skip
    assert config.training.num_tokens_per_train_step == 32 * 32


def test_torchtitan_runs_all_parts_of_a_rank():
    """Of several parts on a rank, a schedule of one part each would run the first."""
    plan = looped()
    parts = len(plan.stages)
    assert parts == 4 and len(plan.schedule.rows) == 2
    assert "Interleaved1F1B" in exported("torchtitan", plan).text
    solved = exported("torchtitan", replace(plan, schedule=replace(plan.schedule, name="solved")))
    assert "Interleaved1F1B" in solved.text
    assert any("'solved' by name" in each and "Interleaved1F1B" in each for each in solved.missing)


def test_accelerate_reads_it(tmp_path):
    config_args = pytest.importorskip("accelerate.commands.config.config_args")
    path = tmp_path / "accelerate.yaml"
    path.write_text(exported("accelerate", replicas()).text)
    read = config_args.ClusterConfig.from_yaml_file(str(path))
    assert read.num_processes == 16 and read.num_machines == 2
    assert read.parallelism_config["parallelism_config_dp_shard_size"] == 4
    assert read.fsdp_config["fsdp_reshard_after_forward"] is True


def test_deepspeeds_batch_sizes_agree():
    content = json.loads(exported("deepspeed", replicas()).text)
    samples = content["train_micro_batch_size_per_gpu"] * content["gradient_accumulation_steps"]
    assert content["train_batch_size"] == samples * 16
    assert content["zero_optimization"]["zero_hpz_partition_size"] == 4


def test_layers_are_counted_without_the_model():
    assert shape_of(uniform()).layers == ((0, 2), (2, 4))
    assert shape_of(uniform()).recompute == "full"
    assert shape_of(odd()).recompute == "some"


def test_unknown_targets_and_other_clusters_are_refused():
    with pytest.raises(PlanError, match="nearest is 'megatron'"):
        export(uniform(), "megatorn", CLUSTER)
    with pytest.raises(PlanError, match="the cluster that it was made for"):
        export(uniform(), "slurm", Cluster.preset("a100-80", devices_per_node=16))


def invoke(*arguments):
    with pytest.raises(SystemExit) as ended:
        main(lambda: app(["export", *arguments]))
    return ended.value.code or 0


def test_the_command_writes_a_file_and_strict_refuses(tmp_path, capsys):
    plan, out = tmp_path / "plan.json", tmp_path / "launch" / "job.sbatch"
    plan_io.save(uniform(), plan)
    asked = (str(plan), "--cluster", "a100-80:2x8", "-o", str(out))
    assert invoke(*asked, "--to", "slurm", "--script", "train.py --lr 1e-4", "--strict") == 0
    assert "torchrun train.py --lr 1e-4" in out.read_text()
    out.unlink()
    assert invoke(*asked, "--to", "deepspeed", "--strict") == 4
    assert "deepspeed cannot say: a pipeline of 2 ranks" in capsys.readouterr().err
    assert not out.exists()


if __name__ == "__main__":
    for name in TARGETS:
        (GOLDEN / f"{name}.txt").write_text(exported(name, replace(uniform(), hash="0" * 64)).text)

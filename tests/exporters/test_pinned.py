"""Every option that an export names is one that its target knows."""

import argparse
import ast
import json
import re
import shlex
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import yaml
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.distributed.run import get_args_parser
from transformers import LlamaConfig, LlamaForCausalLM

from meshwright.exporters import torchtitan
from meshwright.exporters.huggingface import _paired
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.plan.plan import Plan
from meshwright.ir.trace.trace import trace
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import make_problem
from meshwright.testing.spawn import run_ranks
from meshwright.tools.export.export import Exported, export
from tests.exporters.pin import TARGETS, pinned
from tests.exporters.plans import CLUSTER, CONFIG, looped, odd, replicas, uniform
from tests.integrations.as_torchrun import as_torchrun

LLAMA = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16,
         "use_cache": False}  # fmt: skip


def exports(target: str):
    """Of plans that differ in all that targets have options for."""
    config = SimpleNamespace(**vars(CONFIG), intermediate_size=128, num_key_value_heads=2)
    config.tie_word_embeddings = False
    sums = replace(uniform(), precision="bf16-sums", max_grad_norm=1.0)
    deep = replace(replicas(), stages=(replace(replicas().stages[0], zero=2),))
    half = replace(replicas(), precision="fp16", optimizer="sgd")
    for plan in (uniform(), replicas(), looped(), odd(), sums, deep, half):
        yield export(plan, target, CLUSTER, config=config).text


def flags(text: str):
    yield from (("flags", line.split()[0]) for line in text.splitlines() if line.startswith("  --"))


def keys(content: dict, known: dict):
    """Of a nested file; a section is a key whose names are pinned."""
    for key, value in content.items():
        yield "", key
        if isinstance(value, dict) and value:
            assert key in known, f"{key} has no pinned names"
            yield from ((key, inner) for inner in value)


def code(text: str):
    """Names that are imported, arguments of what is called, and fields of `config` that are set."""
    homes = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            homes |= {alias.name: node.module for alias in node.names}
            yield from ((node.module, alias.name) for alias in node.names)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in homes:
            whole = f"{homes[node.func.id]}.{node.func.id}"
            yield from ((whole, word.arg) for word in node.keywords)
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
            named = ast.unparse(node.targets[0])
            yield named.rpartition(".")[0], named.rpartition(".")[2]


READ = {
    "megatron": lambda text, known: flags(text),
    "deepspeed": lambda text, known: keys(json.loads(text), known),
    "accelerate": lambda text, known: keys(yaml.safe_load(text), known),
    "torchtitan": lambda text, known: code(text),
}


@pytest.mark.parametrize("target", TARGETS)
def test_no_export_names_an_option_that_its_target_has_not(target):
    known, used = pinned(target), set()
    for text in exports(target):
        used |= set(READ[target](text, known))
    unknown = [(kind, name) for kind, name in used if name not in known.get(kind, ())]
    assert len(used) > 10 and not unknown


def test_an_unknown_option_is_found():
    found = set(flags("  --tensor-parallel-size 4\n"))
    assert {name for _, name in found} - set(pinned("megatron")["flags"])
    assert ("", "zero") in set(keys({"zero": 3}, pinned("deepspeed")))
    assert "zero" not in pinned("deepspeed")[""]
    assert ("config.training", "batch") in set(code("config.training.batch = 1"))


def test_torch_knows_the_schedules_and_torchrun_its_flags():
    for name in torchtitan._SCHEDULES.values():
        assert get_schedule_class(name)
    for text in exports("torchrun"):
        words = text[text.index("exec torchrun ") :].replace("\\\n", " ").split()[2:]
        given = [re.sub(r'"\$\w+"', "0", word) for word in words]
        read = get_args_parser().parse_args(given)
        assert read.training_script == "train.py" and read.nproc_per_node == "8"


def test_megatrons_own_parser_reads_its_flags():
    """Where Megatron-LM is on the path; its package on PyPI has no parser."""
    parser = pytest.importorskip("megatron.training.arguments", exc_type=ImportError)
    for text in exports("megatron"):
        words = text[text.index("MEGATRON_ARGS=(") + 15 : text.index("\n)")]
        known = parser.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
        known.parse_args(shlex.split(words))


def llama() -> tuple[Plan, Exported]:
    """A plan of our planner for two ranks of tensor parallelism."""
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**LLAMA))
    cluster = Cluster.local(2)
    problem = make_problem(trace(model, global_batch_size=4), cluster, precision="fp32")
    plan = build_plan(problem, uniform_choice(problem, tp=2), predict=False)
    return plan, export(plan, "huggingface", cluster)


def _losses(text: str, folder: str) -> list[float]:
    """Of the model in a folder as it is, and loaded as the exported file says."""
    as_torchrun()
    scope: dict = {}
    exec(text, scope)
    ids = torch.arange(64).view(4, 16)
    models = (
        LlamaForCausalLM.from_pretrained(folder),
        LlamaForCausalLM.from_pretrained(folder, distributed_config=scope["DISTRIBUTED"]),
    )
    return [float(model(input_ids=ids, labels=ids).loss) for model in models]


def test_transformers_runs_the_tp_plan(tmp_path):
    """Each module as the planner splits it: embeddings by columns, the head by its words."""
    _, found = llama()
    assert found.missing == ()
    for rule in ('"model.layers.*.self_attn.q_proj": "colwise"',
                 '"lm_head": "colwise_gather_output"',
                 '"model.layers.*.mlp.down_proj": "rowwise"',
                 '"model.embed_tokens": "embedding_colwise"'):  # fmt: skip
        assert rule in found.text
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**LLAMA)).double().save_pretrained(tmp_path)
    for whole, split in run_ranks(2, _losses, found.text, str(tmp_path)):
        assert whole == pytest.approx(split, rel=1e-12) and whole > 4


def test_transformers_gets_shards_only_where_state_is_split():
    """FSDP 2 shards parameters: ranks of dp_shard that hold all are replicas to it."""
    kept = replace(replicas(), stages=(replace(replicas().stages[0], zero=0),))
    for plan, sizes in ((replicas(), (4, 4)), (kept, (1, 16))):
        text = export(plan, "huggingface", CLUSTER).text
        assert f"fsdp_size={sizes[0]},\n    dp_replicate_size={sizes[1]}," in text


def test_a_module_that_is_whole_among_split_ones_is_handed_what_is_whole():
    near = {"m.q": "colwise", "m.k": "colwise", "m.o": "rowwise"}
    assert _paired(near, is_layer=True) == near
    gathered = {"m.q": "colwise_gather_output", "m.o": "rowwise_split_input"}
    found = _paired(near | {"m.k": "replicate"}, is_layer=True)
    assert found == gathered | {"m.k": "replicate"}
    assert _paired({"m.q": "colwise", "m.o": "rowwise"}, is_layer=False) == gathered


def test_what_transformers_has_no_style_for_is_named():
    """GPT-2's products are turned, and not linear layers."""
    found = export(uniform(), "huggingface", CLUSTER)
    named = " / ".join(found.missing)
    assert "transformer.h.*.mlp.c_fc on tp is S(1)" in named
    assert "transformers refuses FSDP with a pipeline" in named

"""Full-size models as graphs, traced without memory, and small ones that agents learn on."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.graph.graph import Graph
from meshwright.ir.graph.profiled_graph import profiled_graph
from meshwright.ir.profile.layer_profile import read_layer_profile
from meshwright.ir.trace.trace import trace
from meshwright.planner.problem.problem import make_problem
from meshwright.planner.search.plan_comparison import name_of
from meshwright.planner.search.search import search_problem
from meshwright.testing.networks import ResNet50, vgg19


@dataclass(frozen=True)
class Text:
    """A model of text, by the name of its configuration."""

    config: str
    settings: Mapping[str, Any]
    head: str
    sequence: int
    batch: int

    def graph(self) -> Graph:
        config = getattr(transformers, self.config)(**self.settings)
        config.use_cache = False
        with torch.device("meta"):
            model = getattr(transformers, self.head).from_config(config)
            ids = torch.zeros(self.batch, self.sequence, dtype=torch.long)
        return trace(model, {"input_ids": ids, "labels": ids})


@dataclass(frozen=True)
class Images:
    """A network of images."""

    build: Callable[[], nn.Module]
    side: int
    classes: int
    batch: int

    def graph(self) -> Graph:
        with torch.device("meta"):
            model = self.build()
            images = torch.zeros(self.batch, 3, self.side, self.side)
            labels = torch.zeros(self.batch, dtype=torch.long)
        return trace(model, (images, labels), _classified)


@dataclass(frozen=True)
class Measured:
    """Layers that were measured by others, from a folder of profiles."""

    folder: Path
    name: str
    batch: int

    def graph(self) -> Graph:
        return profiled_graph(read_layer_profile(self.folder / self.name), self.batch)


def _classified(output: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, labels)


CAUSAL, MASKED, PAIRS = "AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModelForSeq2SeqLM"
GPT2 = Text("GPT2Config", dict(n_layer=12, n_embd=768, n_head=12), CAUSAL, 1024, 128)
BERT_LARGE = Text(
    "BertConfig",
    dict(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096),
    MASKED, 512, 256,
)  # fmt: skip
T5_LARGE = Text(
    "T5Config",
    dict(d_model=1024, d_kv=64, d_ff=4096, num_layers=24, num_heads=16, decoder_start_token_id=0),
    PAIRS, 512, 128,
)  # fmt: skip
MIXTRAL = Text(
    "MixtralConfig",
    dict(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=32000, num_local_experts=8, num_experts_per_tok=2,
        max_position_embeddings=4096,
    ),
    CAUSAL, 4096, 128,
)  # fmt: skip


def _resnet() -> nn.Module:
    return ResNet50(width=64, classes=1000)


def _vgg() -> nn.Module:
    return vgg19(width=64, classes=1000)


VGG19 = Images(_vgg, 224, 1000, 1024)
RESNET50 = Images(_resnet, 224, 1000, 1024)

LIMIT_S = 3600.0
"""By the clock: machines that do other things too shall not cut a search short."""


def searched(
    graph: Callable[[], Graph], cluster: Cluster, searcher: str, **settings: Any
) -> dict[str, Any]:
    """What a search comes to, and the time that it takes: of a processor, and by the clock."""
    problem = make_problem(graph(), cluster, **settings)
    start, begun = time.process_time(), time.monotonic()
    plan = search_problem(problem, searcher, time_limit_s=LIMIT_S)
    assert plan.predicted and plan.evidence
    return {
        "step_s": plan.predicted.step_s, "bound_s": plan.evidence.bound_s,
        "cpu_s": time.process_time() - start, "wall_s": time.monotonic() - begun,
        "plans": plan.evidence.candidates, "name": name_of(plan),
    }  # fmt: skip


def full_size(profiles: Path | None) -> dict[str, Callable[[], Graph]]:
    """By name; the layer profile only where its folder is given."""
    found: dict[str, Callable[[], Graph]] = {
        "GPT-2": GPT2.graph,
        "BERT-large": BERT_LARGE.graph,
        "T5-large": T5_LARGE.graph,
        "VGG-19": VGG19.graph,
        "ResNet-50": RESNET50.graph,
        "Mixtral-8x7B": MIXTRAL.graph,
    }
    if profiles:
        found["AmoebaNet-36"] = Measured(profiles, "amoeba-36-pbs-1.txt", 128).graph
    return found


def small() -> dict[str, Callable[[], Graph]]:
    """What agents are trained on: few layers, narrow, of several kinds."""
    gpt = dict(n_layer=4, n_embd=256, n_head=4, vocab_size=8192, n_positions=256)
    return {
        "small GPT-2": replace(GPT2, settings=gpt, sequence=256, batch=64).graph,
        "middle GPT-2": replace(
            GPT2, settings=gpt | dict(n_layer=6, n_embd=512, n_head=8), sequence=512, batch=64
        ).graph,
        "small BERT": replace(
            BERT_LARGE, sequence=128, batch=64,
            settings=dict(hidden_size=256, num_hidden_layers=4, num_attention_heads=4,
                          intermediate_size=1024),
        ).graph,
    }  # fmt: skip

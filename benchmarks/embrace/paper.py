"""What the simulator says of EmbRace's models on 16 GPUs: plans whose tables go by rows, against
plain data parallelism.

The paper's abstract says up to 2.41 times over the best of its baselines (v2; its first version up
to 30.66 times over four of them), ZEN's up to 2.48 times in throughput over the state of the art,
S2 Reducer's 1.8 times, for five models.
Its tables of models and of clusters were not at hand: what is here is assumed as it is usual for
models of these names, and said in the report.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.embrace.contenders import OPTIMIZER
from benchmarks.embrace.models import Language, Sentences
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.errors import Infeasible
from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan.plan import Plan
from meshwright.ir.profile.row_counts import RowCounts
from meshwright.ir.trace.trace import trace
from meshwright.planner.search.search import search
from meshwright.testing.networks import GNMT

NODES, EACH, ZIPF = 4, 4, 1.05
DEVICES = {"RTX 3090": "rtx3090", "RTX 2080": "rtx2080"}
GPUS = NODES * EACH
NETWORKS = {"InfiniBand, 100 Gb/s": "infiniband-edr", "Ethernet, 10 Gb/s": "ethernet-10g"}
_LIMIT_S = 600.0
"""Of one search: none takes as long, so that it does not matter who else uses the machine."""
EMBRACE, ZEN, S2 = 2.41, 2.48, 1.8


class Recurrent(nn.Module):
    """The rest of a language model of LM1B: LSTMs of 2,048 with projections to 512 (Jozefowicz et
    al. 2016), and sampled softmax."""

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, 2048, 1, batch_first=True)
        self.project, self.length = nn.Linear(2048, width), length

    def forward(self, words: Tensor, candidates: Tensor) -> Tensor:
        x = self.project(self.lstm(words)[0])
        right, drawn = candidates[:, : self.length], candidates[:, self.length :]
        scores = torch.cat([(x * right).sum(-1, keepdim=True), x @ drawn.transpose(1, 2)], -1)
        return -functional.log_softmax(scores, -1)[..., 0].mean()


@dataclass(frozen=True)
class Published:
    """A model of the paper, as it is taken to be."""

    name: str
    said: str
    graph: Callable[[], Graph]


def _sampled(rest: Callable[[], nn.Module], rows: int, width: int, each: int, length: int) -> Graph:
    """A language model with sampled softmax, `each` sentences a GPU."""
    drawn = 64
    with torch.device("meta"):
        model = Language({"words": (rows, width), "candidates": (rows, width)}, rest())
        ids = torch.zeros(GPUS * each, length, dtype=torch.long)
        candidates = torch.zeros(GPUS * each, length + drawn, dtype=torch.long)
        return trace(model, {"words": ids, "candidates": candidates})


def _gnmt() -> Graph:
    words, each, length = 32_000, 32, 25

    def loss(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    with torch.device("meta"):
        ids = torch.zeros(GPUS * each, length, dtype=torch.long)
        batch = {"source": ids, "target": ids.clone(), "labels": ids.clone()}
        return trace(GNMT(words, 1024, 8), batch, loss)


def _bert() -> Graph:
    """As it is fine-tuned to answer questions: its table is not tied to another."""
    from transformers import BertConfig, BertForQuestionAnswering

    each, length = 8, 384
    config = BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    with torch.device("meta"):
        model = BertForQuestionAnswering(config).train()
        ids = torch.zeros(GPUS * each, length, dtype=torch.long)
        at = torch.zeros(GPUS * each, dtype=torch.long)
        return trace(model, {"input_ids": ids, "start_positions": at, "end_positions": at.clone()})


MODELS = (
    Published(
        "LM", "2 tables of 793,471 words of 512, LSTM of 2,048, 128 sentences of 20 words a GPU",
        lambda: _sampled(lambda: Recurrent(512, 20), 793_471, 512, 128, 20),
    ),
    Published(
        "GNMT-8", "2 tables of 32,000 words of 1,024, 8 layers, whole softmax, 32 sentences of 25",
        _gnmt,
    ),
    Published(
        "Transformer", "2 tables of 32,000 words of 512, 12 layers, 64 sentences of 32",
        lambda: _sampled(lambda: Sentences(512, 8, 12, 32), 32_000, 512, 64, 32),
    ),
    Published(
        "BERT-base", "a table of 30,522 words of 768, 12 layers, answers to questions, 8 of 384",
        _bert,
    ),
)  # fmt: skip


def planned(graph: Graph, device: str, network: str, *pins: str, rows: bool) -> Plan:
    """The best plan with replicas alone."""
    return search(
        graph, Cluster.preset(device, num_nodes=NODES, devices_per_node=EACH, network=network),
        precision="fp32", optimizer=OPTIMIZER, constraints=("pp=1", "model=1", *pins),
        rows=RowCounts(zipf=ZIPF) if rows else None, progress=False, time_limit_s=_LIMIT_S,
    )  # fmt: skip


def step_s(graph: Graph, device: str, network: str, *pins: str, rows: bool) -> float | None:
    """Predicted seconds of a step of the best plan; None where nothing fits."""
    try:
        predicted = planned(graph, device, network, *pins, rows=rows).predicted
    except Infeasible:
        return None
    assert predicted
    return predicted.step_s


def gain(graph: Graph, device: str, network: str) -> tuple[float | None, float | None, float]:
    """Predicted seconds of steps: of tables whole; of the best plan that sends rows to all replicas
    (gathered or packed); of the best."""
    replicas = f"dp_replicate={GPUS}"
    whole = step_s(graph, device, network, replicas, "zero=0", rows=False)
    to_all = step_s(graph, device, network, replicas, rows=True)
    best = step_s(graph, device, network, rows=True)
    assert best
    return whole, to_all, best


def paper_table(models: tuple[Published, ...] = MODELS) -> Iterator[str]:
    """A table in Markdown, and what it is made of."""
    yield (
        f"{GPUS} GPUs in {NODES} nodes, float32, Adagrad, rows that occur as Zipf has it with "
        f"exponent {ZIPF}. The paper's own tables of models and clusters were not at hand: these "
        "are assumed.\n"
    )
    for model in models:
        yield f"- {model.name}: {model.said}"
    yield (
        f"\nPublished: up to {EMBRACE} times over the best of its baselines (EmbRace), up to {ZEN} "
        f"over the state of the art (ZEN); {S2} by sketches that all replicas sum (S2 Reducer), to "
        "whose exact kin, rows to all, the last column belongs.\n"
    )
    yield (
        "| model | GPU | network | tables whole, ms | rows to all, ms | rows to owners, ms "
        "| over whole | over rows to all | rows to all over whole |"
    )
    yield "|---" * 9 + "|"
    for model in models:
        graph = model.graph()
        for gpu, device in DEVICES.items():
            for name, network in NETWORKS.items():
                whole, to_all, best = gain(graph, device, network)
                times = " | ".join(_or_none(x, 1e3, 0) for x in (whole, to_all, best))
                over = " | ".join(_or_none(x, 1 / best, 2) for x in (whole, to_all))
                all_over = _or_none(whole, 1 / to_all, 2) if to_all else "does not fit"
                yield f"| {model.name} | {gpu} | {name} | {times} | {over} | {all_over} |"


def _or_none(value: float | None, times: float, digits: int) -> str:
    return "does not fit" if value is None else f"{value * times:.{digits}f}"

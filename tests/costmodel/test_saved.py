"""Saved activations of traced models against what autograd really keeps."""

import pytest
import torch
from torch import Tensor, nn

from meshwright.costmodel.block import block
from meshwright.costmodel.cost_cache import BlockSpot, CostTables
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan.plan import BlockLayout
from meshwright.ir.trace.loss_module import TrainingStep
from meshwright.testing.models import CASES, ModelCase
from tests.traces import zoo_graph

CLUSTER = Cluster.preset("a100-80")
# Where eager and traced attention differ (masks that eager leaves out), 10 % of slack.
MODELS = ("sequential", "gpt2", "llama", "bert_mlm", "vit", "vgg19", "resnet50", "dlrm")


def kept_by_autograd(model: nn.Module, case: ModelCase, batch: object) -> int:
    """Bytes of the distinct storages that one forward leaves alive, the model's own left out."""
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    values = batch.values() if isinstance(batch, dict) else batch
    own |= {t.untyped_storage().data_ptr() for t in values}  # type: ignore[attr-defined]
    found: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = _loss(model, case, batch)
        kept = sum(found.values())
        del loss
    return kept


def _loss(model: nn.Module, case: ModelCase, batch: object) -> Tensor:
    if isinstance(batch, dict):
        step = TrainingStep(model, case.loss_fn, tuple(batch))
        return step(*batch.values())  # type: ignore[no-any-return]
    assert isinstance(batch, tuple)
    step = TrainingStep(model, case.loss_fn, tuple(map(str, range(len(batch)))))
    return step(*batch)  # type: ignore[no-any-return]


def whole(graph: Graph) -> dict[str, BlockLayout]:
    """Everything replicated."""
    prelude = BlockLayout(
        name="p", pattern="(prelude)", mesh={}, parameters={}, ops={}, inputs=(), outputs=()
    )
    return {"(prelude)": prelude} | {
        b.pattern: BlockLayout(
            name=b.pattern, pattern=b.pattern, mesh={}, parameters={}, ops={},
            inputs=({},) * len(b.inputs), outputs=({},) * len(b.outputs),
        )
        for b in graph.distinct_blocks()
    }  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_saved_bytes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of autograd alone: that a runtime holds what enters blocks has its test beside jobs."""
    monkeypatch.setattr(block, "_left_at_border", lambda *_: 0)
    case = CASES[name]
    model = case.model(torch.float32)
    batch = case.example(dtype=torch.float32)
    graph = zoo_graph(case, dtype=torch.float32)
    tables = CostTables(graph, CLUSTER, "fp32")
    spot = BlockSpot(graph.batch_size, 1, (), "a100-80", (), ())
    cost = tables.stage(graph.blocks, whole(graph), [False] * len(graph.blocks), spot)
    expected = kept_by_autograd(model, case, batch)
    assert cost.saved_bytes == pytest.approx(expected, rel=0.1)
    trained = sum(n for name, n in cost.params.items() if name in tables.trained)
    assert trained == sum(p.nbytes for p in model.parameters())

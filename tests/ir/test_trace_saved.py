"""What the graph says autograd keeps is what autograd keeps when the real model runs."""

import pytest
import torch

from meshwright.ir.graph.graph import Graph, Kind
from meshwright.ir.torch_private import storage_key
from meshwright.ir.trace.loss_module import TrainingStep, flatten_batch
from meshwright.ir.trace.trace import trace
from meshwright.testing.interpret import interpret
from meshwright.testing.models import CASES, ModelCase
from tests.traces import zoo_graph

_STATE = (Kind.PARAMETER, Kind.BUFFER)


def kept_by_autograd(case: ModelCase, dtype: torch.dtype, graph: Graph | None = None) -> int:
    """Bytes of the distinct storages that backward needs, without those of the model's state.

    Of the eager step, or of the graph run op by op.
    """
    model = case.model(dtype)
    batch = case.example(dtype=dtype)
    inputs = flatten_batch(batch)
    state = {storage_key(t) for t in (*model.parameters(), *model.buffers())}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if storage_key(tensor) not in state:
            kept[storage_key(tensor)] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        if graph is None:
            loss = TrainingStep(model, case.loss_fn, tuple(inputs))(*inputs.values())
        else:
            loss = interpret(graph, model, batch)[graph.loss]
    loss.backward()
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def kept_by_graph(graph: Graph) -> int:
    names = {name for op in graph.ops for name in op.saved}
    tensors = [graph.tensors[name] for name in names]
    held = sum(t.nbytes for t in tensors if t.kind not in _STATE)
    return held + sum(op.saved_extra_bytes for op in graph.ops)


# Mixtral runs its experts one by one in eager mode, not as one operator: another thing is kept.
# The LSTM of oneDNN, which takes float32, keeps a workspace of its own.
_OTHER = {("mixtral", torch.float64), ("mixtral", torch.float32), ("gnmt", torch.float32)}


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "dtype"),
    [(n, d) for n in sorted(CASES) for d in (torch.float64, torch.float32) if (n, d) not in _OTHER],
)
def test_saved_bytes(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    graph = zoo_graph(case, dtype=dtype)
    assert kept_by_graph(graph) == pytest.approx(kept_by_autograd(case, dtype, graph), rel=0.02)
    # The eager step makes some of the prelude several times, such as the first states of LSTMs.
    assert kept_by_graph(graph) == pytest.approx(kept_by_autograd(case, dtype), rel=0.03)


def test_recurrent_layers_scale_with_the_dtype() -> None:
    case = CASES["gnmt"]
    wide, narrow = (
        kept_by_graph(trace(case.model(d), case.example(dtype=d), case.loss_fn))
        for d in (torch.float64, torch.float32)
    )
    assert narrow == pytest.approx(wide / 2, rel=0.05)

"""Every source that is written is Python, whatever the model and its names are like."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.zoo.configs import hf
from benchmarks.zoo.main import ENTRIES
from benchmarks.zoo.run import traced
from meshwright.codegen.lower.lower import lower
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.graph.graph import Graph
from meshwright.ir.trace.trace import trace
from meshwright.planner.search.search import search


def compiled(graph: Graph, ranks: int = 2, precision: str = "fp32") -> Iterator[str]:
    """The sources of rank 0, each of them compiled."""
    plan = search(graph, Cluster.local(ranks), optimizer="sgd", precision=precision, progress=False)
    for program in lower(graph, plan, 0):
        compile(program.source, f"stage{program.index}.py", "exec")
        yield program.source


@pytest.mark.parametrize("name", ["gpt2", "unet", "queue", "autograd_function"])
def test_models_of_the_zoo(name: str) -> None:
    graph = traced(ENTRIES[name], ENTRIES[name].model())
    assert all("def forward(" in source for source in compiled(graph, precision="fp64"))


def test_an_argument_that_python_keeps_for_itself() -> None:
    """PhiMoE draws from `uniform(from=..., to=...)`."""
    model = hf("PhimoeForCausalLM", num_local_experts=4)().train()
    ids = torch.randint(3, 60, (4, 8))
    compiled(trace(model, {"input_ids": ids, "labels": ids}), ranks=1)


class Named(nn.Module):
    """Modules, parameters and inputs of these names."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(8, 8) for name in names})
        self.scales = nn.ParameterDict({name: torch.ones(8) for name in names})

    def forward(self, **inputs: Tensor) -> Tensor:
        x, y = inputs.values()
        for name, layer in self.layers.items():
            x = torch.tanh(layer(x)) * self.scales[name]
        return F.mse_loss(x, y)


NAMES: list[tuple[str, ...]] = [
    ("lambda", "class"), ("comm", "torch"), ("None", "True"), ("a b", 'x"y'), ("é", "日本"),
    ("aten", "sharded"), ("0", "1x"), ("print", "dict"),
]  # fmt: skip


@pytest.mark.parametrize("names", NAMES, ids="-".join)
def test_names_that_python_or_generated_code_uses(names: tuple[str, ...]) -> None:
    model, batch = Named(names), {name: torch.ones(4, 8) for name in names}
    (source,) = compiled(trace(model, batch), ranks=1)
    written: dict[str, Callable[..., dict[str, Tensor]]] = {}
    exec(compile(source, "stage0.py", "exec"), written)
    graph = trace(model, batch)
    state = {t.name: dict(model.named_parameters())[t.fqn] for t in graph.parameters}
    given = state | dict(zip(graph.inputs, batch.values(), strict=True))
    loss = written["forward"](_Comm(), given)[graph.loss]
    torch.testing.assert_close(loss, model(**batch))


class _Comm:
    """Of one rank: only what the code sets on it."""

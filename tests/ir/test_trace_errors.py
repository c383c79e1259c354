"""What cannot be traced is refused with the operation, the user's line and a way out."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import BertConfig, BertModel

from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.errors import PlanError, TraceError
from meshwright.ir.plan.verify import verify
from meshwright.ir.trace.trace import trace
from meshwright.planner.search.search import search


class _Step(nn.Module):
    """A linear layer followed by `after`."""

    def __init__(self, after: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.after = after

    def forward(self, x: torch.Tensor) -> Any:
        return self.after(self.linear(x))


class _Branch(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        if x.sum() > 0:
            return x.mean()
        return x.sum()


class _Pick(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        return x[x > 0].sum()


class _Read(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        return x.sum() * x.max().item()


EXAMPLE = (torch.ones(2, 4),)


@pytest.mark.parametrize(
    ("model", "line"),
    [(_Branch, "if x.sum() > 0:"), (_Pick, "x[x > 0].sum()"), (_Read, "x.max().item()")],
)
def test_values_that_are_not_known(model: type[nn.Linear], line: str) -> None:
    with pytest.raises(TraceError, match="values of a tensor") as error:
        trace(model(4, 4), EXAMPLE)
    assert line in str(error.value)
    assert "test_trace_errors.py:" in str(error.value)
    assert "torch.where" in str(error.value)


@pytest.mark.parametrize(
    ("after", "message"),
    [
        (lambda x: x, "shape .2, 4.; it must be one number"),
        (lambda x: {"logits": x}, "without a loss"),
        (lambda x: (x.sum(), None), "without a loss"),
        (lambda x: torch.zeros(()), "does not depend on any parameter"),
    ],
)
def test_no_loss(after: Callable[..., Any], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        trace(_Step(after), EXAMPLE)


def test_loss_function_needs_a_target() -> None:
    with pytest.raises(TraceError, match="at least two tensors"):
        trace(nn.Linear(4, 2), EXAMPLE, F.mse_loss)


def test_no_parameters() -> None:
    with pytest.raises(TraceError, match="ReLU has no parameters"):
        trace(nn.ReLU(), EXAMPLE)


def test_no_inputs() -> None:
    with pytest.raises(TraceError, match="Linear needs example_inputs"):
        trace(nn.Linear(4, 2))
    with pytest.raises(TraceError, match="example_inputs is empty"):
        trace(nn.Linear(4, 2), ())


def test_inputs_that_are_no_tensors() -> None:
    with pytest.raises(TraceError, match="input 'flag' is a bool"):
        trace(nn.Linear(4, 2), {"input": torch.ones(2, 4), "flag": True})


def test_batch_dim_is_needed() -> None:
    with pytest.raises(TraceError, match="input '0' has no dims"):
        trace(_Step(torch.sum), (torch.tensor(1.0),))
    with pytest.raises(TraceError, match="global_batch_size is 0"):
        trace(_Step(torch.sum), EXAMPLE, global_batch_size=0)
    with pytest.raises(TraceError, match="at most 1,099,511,627,776 is taken"):
        trace(_Step(torch.sum), EXAMPLE, global_batch_size=10**23)
    with pytest.raises(TraceError, match="at most 68,719,476,736 elements"):
        trace(_Step(torch.sum), EXAMPLE, global_batch_size=2**40)


class _Decayed(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.mul_(0.9)
        return super().forward(x).sum()


def test_parameter_changed_in_place() -> None:
    with pytest.raises(TraceError, match="parameter in place"):
        trace(_Decayed(4, 4), EXAMPLE)


def test_lazy_parameters() -> None:
    with pytest.raises(TraceError, match="lazy parameters"):
        trace(nn.Sequential(nn.LazyLinear(3)), (*EXAMPLE, torch.ones(2, 3)), F.mse_loss)


def test_loss_function_with_a_parameter() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return F.mse_loss(x, y) * self.scale

    with pytest.raises(TraceError, match=r"parameter, loss_fn.scale"):
        trace(nn.Linear(4, 4), (*EXAMPLE, torch.ones(2, 4)), Scaled())


def test_hugging_face_model_without_a_head() -> None:
    model = BertModel(
        BertConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)
    )
    with pytest.raises(TraceError, match="BertModel takes no labels"):
        trace(model)


def test_autocast_inside_the_model() -> None:
    def after(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return (x @ x.T).sum()

    with pytest.raises(TraceError, match="autocast"):
        trace(_Step(after), EXAMPLE)


def test_autocast_that_is_off_is_no_harm_where_nothing_casts() -> None:
    """Routers and norms turn it off around what shall be in float32."""

    def after(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return (x @ x.T).sum()

    graph = trace(_Step(after), EXAMPLE)
    assert graph.no_autocast.startswith("ir/test_trace_errors.py:")
    plain = trace(_Step(lambda x: (x @ x.T).sum()), EXAMPLE)
    assert graph.fingerprint == plain.fingerprint and not plain.no_autocast
    with pytest.raises(PlanError, match=r"turns that off; nearest is 'bf16'.* or 'fp32'"):
        search(graph, Cluster.local(1), progress=False)
    plan = search(plain, Cluster.local(1), progress=False)
    assert plan.precision == "bf16-autocast"
    (found,) = verify(plan, graph)
    assert found.rule == "precision" and graph.no_autocast in found.message


def test_large_constants() -> None:
    big = torch.ones(300, 300)
    with pytest.raises(TraceError, match="90000 elements"):
        trace(_Step(lambda x: x.sum() * big.sum()), EXAMPLE)


def test_errors_of_the_model_itself_come_through() -> None:
    with pytest.raises(RuntimeError, match="reduction dim"):
        trace(_Step(torch.sum), (torch.ones(2, 5),))


class _Cast(nn.Module):
    """Puts its layer into `dtype` while it runs, as routers of experts do."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear, self.dtype = nn.Linear(4, 4), dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear.to(self.dtype)(x.to(self.dtype)).sum()


def test_a_cast_of_parameters_that_changes_nothing_is_none() -> None:
    targets = [op.target for op in trace(_Cast(torch.float32), EXAMPLE).ops]
    assert [t for t in targets if not t.startswith("aten.to.")] == [
        "aten.linear.default",
        "aten.sum.default",
    ]


def test_a_cast_of_parameters_in_the_forward_is_refused() -> None:
    with pytest.raises(
        TraceError, match=r"changes weight of Linear from .*float32 .*bfloat16"
    ) as e:
        trace(_Cast(torch.bfloat16), EXAMPLE)
    assert "test_trace_errors.py:" in str(e.value)

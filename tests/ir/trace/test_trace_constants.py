"""Values that depend on shapes alone are known while tracing; assertions on others hold."""

import pytest
import torch
from torch import Tensor, nn

from meshwright.ir.errors import TraceError
from meshwright.ir.trace.trace import trace


class Reader(nn.Module):
    """A linear layer, then what `read` does."""

    def __init__(self, read) -> None:
        super().__init__()
        self.linear, self.read = nn.Linear(4, 4), read

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.read(self.linear(x), x).sum()}


def ops_of(read) -> list[str]:
    graph = trace(Reader(read), {"x": torch.randn(2, 4)})
    return [op.target.split(".")[1] for op in graph.ops]


def by_shape(y: Tensor, x: Tensor) -> Tensor:
    mask = torch.full((4, 4), float("-inf")).triu(1)
    causal = (mask == torch.triu(torch.full_like(mask, float("-inf")), 1)).all()
    return y.tanh() if causal else y.exp()


def by_count(y: Tensor, x: Tensor) -> Tensor:
    steps = torch.arange(y.shape[1]).max().item()
    return y[:, : int(steps)]


def test_what_depends_on_shapes_is_known() -> None:
    assert "tanh" in ops_of(by_shape) and "exp" not in ops_of(by_shape)
    assert "slice" in ops_of(by_count)


def changed(y: Tensor, x: Tensor) -> Tensor:
    mask = torch.zeros(4)
    mask[0] = x[0, 0]
    return y.tanh() if mask.any() else y.exp()


def drawn(y: Tensor, x: Tensor) -> Tensor:
    return y.tanh() if torch.rand(4).gt(0.5).any() else y.exp()


def changed_by_or(y: Tensor, x: Tensor) -> Tensor:
    mask = torch.zeros(4, dtype=torch.bool)
    mask |= x[0] > 0
    return y.tanh() if mask.any() else y.exp()


def changed_as_out(y: Tensor, x: Tensor) -> Tensor:
    mask = torch.zeros(4)
    torch.add(mask, x[0], out=mask)
    return y.tanh() if mask.any() else y.exp()


def handed_back(y: Tensor, x: Tensor) -> Tensor:
    """What some calls return is what they are given."""
    mask = torch.ones(4).contiguous().to("cpu")
    whole = mask[:2]._base
    assert whole is not None
    return y.tanh() if mask.any() and whole.any() else y.exp()


def of_a_distribution(y: Tensor, x: Tensor) -> Tensor:
    """As Gemma 3n's cut-off; what it is made from is checked by what it computes."""
    return y * torch.distributions.Normal(0, 1).icdf(torch.tensor(0.9))


@pytest.mark.parametrize("read", [handed_back, of_a_distribution])
def test_what_is_handed_back_is_known_by_what_made_it(read) -> None:
    assert "exp" not in ops_of(read)


@pytest.mark.parametrize("read", [changed, drawn, changed_by_or, changed_as_out])
def test_what_was_written_to_or_drawn_is_not_known(read) -> None:
    with pytest.raises(TraceError, match=r"test_trace_constants\.py:\d+: `return y\.tanh"):
        ops_of(read)


def asserting(y: Tensor, x: Tensor) -> Tensor:
    assert (x < 100).all(), "too large"
    assert not torch.isnan(x).any()
    assert torch.all(x > -100).item()
    return y.tanh()


def test_assertions_on_values_are_taken_to_hold() -> None:
    assert ops_of(asserting) == ["linear", "tanh", "sum"]


def checked(y: Tensor, x: Tensor) -> Tensor:
    torch._check(x.argmax().item() >= 0)
    return y.tanh()


def test_a_value_that_only_a_check_reads_does_no_harm() -> None:
    assert ops_of(checked) == ["linear", "tanh", "sum"]

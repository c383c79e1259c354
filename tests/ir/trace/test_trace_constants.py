"""Values that depend on shapes alone are known while tracing; assertions on others hold."""

import pytest
import torch
from torch import Tensor, nn

from meshwright.ir.errors import TraceError
from meshwright.ir.trace.trace import trace
from meshwright.testing.interpret import interpret


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


def in_windows(y: Tensor, x: Tensor) -> Tensor:
    """As Qwen-VL has its pictures, of a size that the model knows: by counts, ends and masks."""
    grid = torch.tensor([[1, 2, 2], [1, 1, 4]])
    counts = grid.prod(1)
    ends = torch.repeat_interleave(counts, grid[:, 0]).cumsum(0)
    places = torch.arange(counts.sum()) % 4
    padded = torch.nn.functional.pad(places.view(2, 4), (0, 2), value=-100)
    kept = padded[padded != -100]
    lengths = torch.unique_consecutive(torch.cat([ends.new_zeros(1), ends])).diff().tolist()
    parts = y.flatten()[kept + 4 * (torch.arange(8) // 4)].split(lengths)
    return torch.cat([part.softmax(0) for part in parts])


def by_known_mask(y: Tensor, x: Tensor) -> Tensor:
    """As Gemma 4 drops places that have no picture."""
    places = torch.tensor([[0, 1, 2, -1], [0, 1, -1, -1]])
    return y[places != -1].exp() + y[(places != -1).any(1)].sum()


def test_what_known_masks_pick_is_known() -> None:
    model, x = Reader(by_known_mask), torch.randn(2, 4)
    graph = trace(model, {"x": x})
    (made,) = (op for op in graph.ops if op.target == "aten.exp.default")
    assert graph.tensors[made.outputs[0]].shape == (5,)
    assert torch.equal(interpret(graph, model, {"x": x})[graph.loss], model(x)["loss"])


def test_sizes_that_known_values_decide_are_known() -> None:
    model, x = Reader(in_windows), torch.randn(2, 4)
    graph = trace(model, {"x": x})
    assert [op.target for op in graph.ops].count("aten.softmax.int") == 2
    assert torch.equal(interpret(graph, model, {"x": x})[graph.loss], model(x)["loss"])


def by_mask_of_data(y: Tensor, x: Tensor) -> Tensor:
    return y[x > 0]


def by_count_of_data(y: Tensor, x: Tensor) -> Tensor:
    return y + torch.arange((x > 0).sum()).sum()


@pytest.mark.parametrize("read", [by_mask_of_data, by_count_of_data])
def test_sizes_that_data_decide_are_not_known(read) -> None:
    with pytest.raises(TraceError, match="needs the values of a tensor"):
        ops_of(read)


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


def clamped(y: Tensor, x: Tensor) -> Tensor:
    """As layers of DETR do in training."""
    if not torch.isfinite(y).all() or torch.isnan(x).any() or x.isinf().any().item():
        y = y.clamp(-1e30, 1e30)
    return y


def some_finite(y: Tensor, x: Tensor) -> Tensor:
    return y.tanh() if torch.isfinite(y).any() else y.exp()


def rows_finite(y: Tensor, x: Tensor) -> Tensor:
    return y.tanh() if torch.isfinite(y).all(0)[0] else y.exp()


def test_values_are_taken_to_be_finite() -> None:
    """And if they are not, the loss is not either: nothing is hidden."""
    model, x = Reader(clamped), torch.randn(2, 4)
    graph = trace(model, {"x": x})
    assert "clamp" not in ops_of(clamped)
    assert torch.equal(interpret(graph, model, {"x": x})[graph.loss], model(x)["loss"])
    x[0, 0] = torch.inf
    assert not interpret(graph, model, {"x": x})[graph.loss].isfinite()


@pytest.mark.parametrize("read", [some_finite, rows_finite])
def test_other_questions_about_finite_values_are_not_answered(read) -> None:
    with pytest.raises(TraceError, match="needs the values of a tensor"):
        ops_of(read)

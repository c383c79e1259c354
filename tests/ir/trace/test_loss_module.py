"""A batch is tensors by name, whatever holds them; what is no tensor is refused in words."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from meshwright.ir.errors import TraceError
from meshwright.ir.trace.loss_module import flatten_batch
from meshwright.ir.trace.trace import trace

X, Y = torch.ones(2, 4), torch.zeros(2)


@dataclass
class Record:
    x: Tensor
    y: Tensor
    mask: Tensor | None = None


class Attrs:
    """What the attrs package makes of a class, as far as it matters here."""

    __attrs_attrs__ = (SimpleNamespace(name="x"), SimpleNamespace(name="y"))
    x, y = X, Y


class Keyed:
    """Has keys and items, as tensor dictionaries do, and is no Mapping."""

    def keys(self) -> list[str]:
        return ["x", "y"]

    def __getitem__(self, key: str) -> Tensor:
        return {"x": X, "y": Y}[key]


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


@pytest.mark.parametrize(
    "batch",
    [{"x": X, "y": Y}, Record(X, Y), Attrs(), Keyed(), SimpleNamespace(x=X, y=Y)],
    ids=lambda batch: type(batch).__name__,
)
def test_fields_are_inputs_by_name(batch: Any) -> None:
    found = flatten_batch(batch)
    assert list(found) == ["x", "y"] and found["x"] is X


@pytest.mark.parametrize("batch", [(X, Y), [X, Y], Pair(X, Y)], ids=lambda b: type(b).__name__)
def test_a_tuple_is_inputs_by_place(batch: Any) -> None:
    assert list(flatten_batch(batch)) == ["0", "1"]


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (object(), "a batch is a object; it must be a dict of tensors"),
        (X.tolist, "a batch is a builtin_function_or_method"),
        ("text", "a batch is a str"),
        ({"x": {"inner": X}}, "input 'x' is a dict; .* into the batch itself"),
        ({"x": Record(X, Y)}, "input 'x' is a Record; .* into the batch itself"),
        ({"x": [X]}, "input 'x' is a list"),
        ({"x": 3.0}, "input 'x' is a float; .* functools.partial"),
        ({"x": X.to_sparse()}, "input 'x' is a sparse tensor"),
        ({"x": torch.nested.nested_tensor([X, X[:1]])}, "input 'x' is a nested tensor"),
    ],
)  # fmt: skip
def test_other_batches_are_refused(batch: Any, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        flatten_batch(batch)


class Special(Tensor):
    """A tensor with operators of its own."""

    @classmethod
    def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
        return super().__torch_function__(*args, **kwargs)


def test_a_plain_subclass_may_be_an_input() -> None:
    assert flatten_batch((X.as_subclass(Special),)).keys() == {"0"}


class Holds(nn.Module):
    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("held", tensor)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).sum()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.eye(4).to_sparse_csr(), "held is a sparse tensor .torch.sparse_csr."),
        (torch.ones(4).as_subclass(Special), "held is a Special, a kind of tensor"),
        (torch.quantize_per_tensor(X, 0.1, 0, torch.qint8), "held is a quantised tensor"),
    ],
    ids=["sparse", "subclass", "quantised"],
)
def test_special_tensors_of_a_model_are_refused(tensor: Tensor, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        trace(Holds(tensor), (X,))

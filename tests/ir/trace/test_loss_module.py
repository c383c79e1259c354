"""A batch is tensors by name, whatever holds them; what is no tensor is refused in words."""

from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only, tree_structure

from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.errors import TraceError
from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan.plan import Plan
from meshwright.ir.trace.loss_module import (
    flatten_batch,
    keyword_names,
    nested_batch,
    takes_output_alone,
)
from meshwright.ir.trace.trace import trace
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import make_problem
from meshwright.running.launch import batches
from meshwright.runtime.check.model import check_model
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.runtime.job.compile import inputs_of
from meshwright.testing.spawn import alone, run_ranks
from meshwright.tools.dry.run import DryRun, dry_run

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
        ({"x": Record(X, Y)}, "input 'x' is a Record; .* into the batch itself"),
        ({"x": {"inner": Record(X, Y)}}, "input 'x.inner' is a Record"),
        ({"x": Pair(X, Y)}, "input 'x' is a Pair: only dicts, lists and tuples"),
        ({"x": {"inner": 3}}, "input 'x.inner' is a int; .* functools.partial"),
        ((X, None), "a batch ends with None"),
        ((X, (Y, None), Y), "input '1' ends with None, which stands for what is not there"),
        ({"x": X, "y": {"z": {"a": None}}}, "input 'y.z' has no tensor inside; leave it out"),
        ((X, []), "input '1' has no tensor inside"),
        ({"x": {"0": X}}, "input 'x' has keys that are numbers"),
        ({"x": {0: X}}, "input 'x' has keys that are numbers"),
        ({"x.y": X}, "input 'x.y': keys of a batch must be texts without '.'"),
        ({"x": {("a",): X}}, "keys of a batch must be texts"),
        ({"x": 3.0}, "input 'x' is a float; .* functools.partial"),
        ({"x": X.to_sparse()}, "input 'x' is a sparse tensor"),
        ({"x": torch.nested.nested_tensor([X, X[:1]])}, "input 'x' is a nested tensor"),
    ],
)  # fmt: skip
def test_other_batches_are_refused(batch: Any, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        flatten_batch(batch)


@pytest.mark.parametrize(
    ("batch", "names"),
    [
        ({"x": X, "y": Y}, ["x", "y"]),
        ((X, Y), ["0", "1"]),
        ((X, None, Y), ["0", "2"]),
        ({"x": {"a": X, "b": (X, {"c": Y})}, "y": Y}, ["x.a", "x.b.0", "x.b.1.c", "y"]),
        (({"a": X, "b": Y}, Y), ["0.a", "0.b", "1"]),
        ((X, (None, Y)), ["0", "1.1"]),
        ({"01": X, "²": Y}, ["01", "²"]),
        ({"10000": X}, ["10000"]),
    ],
)
def test_what_is_inside_an_item_comes_back_in_its_place(batch: Any, names: list[str]) -> None:
    flat = flatten_batch(batch)
    assert list(flat) == names
    again = nested_batch(flat)
    assert tree_structure(again) == tree_structure(batch) and flatten_batch(again) == flat


class Two(nn.Module):
    """Reads a dict and a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, given: dict[str, Tensor], more: tuple[Any, ...] = ()) -> Tensor:
        found = self.left(given["a"]) - self.right(given["b"])
        return found if not more else found * more[1][:, None]


class Mean(nn.Module):
    def forward(self, output: Tensor) -> Tensor:
        return output.mean()


def _doubled(tree: Any) -> Any:
    return tree_map_only(Tensor, lambda x: x.double() + 0.5, tree)


def _of_two(output: Tensor, target: Tensor) -> Tensor:
    return (output - target[:, None]).square().mean()


def _of_batch(output: Tensor, batch: dict[str, Any]) -> Tensor:
    return _of_two(output, batch["target"]["y"])


@pytest.mark.parametrize(
    ("batch", "loss_fn", "wanted"),
    [
        (({"a": X, "b": X}, Y), _of_two, lambda m, y: _of_two(m({"a": X, "b": X}), y)),
        (
            ({"a": X, "b": X}, (None, Y + 2)), lambda output: output.square().mean(),
            lambda m, _: m({"a": X, "b": X}, (None, Y + 2)).square().mean(),
        ),
        (
            {"given": {"a": X, "b": X}, "target": {"y": Y}}, _of_batch,
            lambda m, y: _of_two(m({"a": X, "b": X}), y),
        ),
        (
            {"given": {"a": X, "b": X}, "more": (None, Y + 2)}, Mean(),
            lambda m, _: m({"a": X, "b": X}, (None, Y + 2)).mean(),
        ),
    ],
    ids=["pair", "output alone", "nested dict", "a module of the output"],
)  # fmt: skip
def test_a_job_trains_on_nested_batches(batch: Any, loss_fn: Any, wanted: Any) -> None:
    torch.manual_seed(0)
    model = Two().double()
    batch = _doubled(batch)
    plain = deepcopy(model)
    loss = wanted(lambda *given: plain(*_doubled(given)), Y + 0.5)
    loss.backward()
    problem = make_problem(
        trace(model, batch, loss_fn), Cluster.local(1), precision="fp64", optimizer="sgd"
    )
    plan = build_plan(problem, uniform_choice(problem), predict=False)

    def train() -> tuple[float, list[Tensor]]:
        job = compile_job(model, plan, optimizer="sgd", lr=0.5, loss_fn=loss_fn)
        found = float(job.step(batch))
        job.sync_to(model)
        return found, [x.detach() for x in model.parameters()]

    found, trained = alone(train)
    assert found == pytest.approx(float(loss.detach()), rel=1e-12)
    for own, other in zip(trained, plain.parameters(), strict=True):
        torch.testing.assert_close(own, other.detach() - 0.5 * other.grad, rtol=1e-12, atol=1e-12)


def _both_ways(model: nn.Module, plan: Plan, batch: Any) -> list[float]:
    """Losses of two steps on the whole batch, and of the same on a rank's own part of it."""
    found = []
    for sharded in (False, True):
        example = batch if sharded else None
        job = compile_job(
            deepcopy(model), plan, optimizer="sgd", lr=0.5, example_inputs=example, check=True
        )
        assert job.checked and not job.checked.unchecked, job.checked
        given = job.shard(batch) if sharded else batch
        found += [float(job.step(given, sharded=sharded)) for _ in range(2)]
        job.close()
    return found


class Loss(Two):
    def forward(self, given: Any, more: Any = ()) -> Tensor:
        return super().forward(given, more).square().mean()


def _dry_run(rank: int, store: str, plan: Plan, graph: Graph) -> DryRun:
    return dry_run(plan, graph)


def test_whoever_makes_a_batch_makes_a_nested_one() -> None:
    """Examples, random batches and dry runs have the names of the plan; parts of a batch are as
    it is, and a job's first step is compared on it."""
    torch.manual_seed(0)
    model = Loss().double()
    own = torch.randn(4, 4).double(), torch.randn(4, 4).double(), torch.randn(4).double()
    batch = {"a": own[0], "b": own[1]}, (None, own[2])
    graph = trace(model, batch)
    problem = make_problem(graph, Cluster.local(2), precision="fp64", optimizer="sgd")
    plan = build_plan(problem, uniform_choice(problem, dp_replicate=2), predict=False)
    for made in (inputs_of(plan), next(batches(plan, None))):
        found = {name: x.shape for name, x in flatten_batch(made).items()}
        assert found == {"0.a": (4, 4), "0.b": (4, 4), "1.1": (4,)}
    assert not run_ranks(1, _dry_run, plan, graph, init=False)[0].findings
    checked = alone(
        partial(check_model, model, None, plan, graph, flatten_batch(batch), short=False)
    )
    assert checked.difference is None and checked.how == "2 samples, float64"
    for losses in run_ranks(2, _both_ways, model, plan, batch):
        assert losses[:2] == pytest.approx(losses[2:], rel=1e-12) and losses[1] < losses[0]


def test_a_model_gets_all_of_a_batch_that_no_loss_function_reads() -> None:
    batch = {"given": {"a": X, "b": X}, "target": Y}
    with pytest.raises(TypeError, match="unexpected keyword argument 'target'"):
        trace(Two(), batch, Mean())


def test_what_a_loss_function_is_given() -> None:
    def two(output: Tensor, target: Tensor | None = None) -> Tensor: ...
    def scaled(output: Tensor, scale: float = 2.0) -> Tensor: ...
    def named(output: Tensor, *, scale: float = 2.0) -> Tensor: ...

    assert not takes_output_alone(two) and not takes_output_alone(nn.CrossEntropyLoss())
    assert not takes_output_alone(F.mse_loss) and not takes_output_alone(lambda *given: given[0])
    assert takes_output_alone(named) and takes_output_alone(partial(scaled, scale=1.0))
    for ambiguous in (scaled, lambda output=None, scale=2.0: output * scale):
        with pytest.raises(TraceError, match=r"second argument 'scale', which is 2\.0 by default"):
            takes_output_alone(ambiguous)


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


class _HandsOn(nn.Module):
    """As peft's and torch's wrappers are: forward takes anything, and hands it on."""

    def __init__(self, model: nn.Module, *, by_call: bool) -> None:
        super().__init__()
        self.inner = model
        if by_call:
            self.get_base_model = lambda: self.inner
        else:
            self.module = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


class _Named(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


@pytest.mark.parametrize("by_call", [True, False])
def test_a_wrapper_gets_what_the_model_inside_takes(by_call: bool) -> None:
    """And not what only the loss function reads."""
    wrapped = _HandsOn(_Named(4, 1), by_call=by_call)
    assert keyword_names(wrapped) == frozenset({"x"})
    graph = trace(wrapped, {"x": X, "y": Y}, lambda out, batch: (out.sum(1) - batch["y"]).sum())
    assert graph.input_names == ("x", "y")


def test_a_wrapper_of_nobody_knows_what_takes_all() -> None:
    class Any_(nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> Any: ...

    assert keyword_names(Any_()) is None

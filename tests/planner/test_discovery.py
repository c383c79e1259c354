"""Rules that trying an op finds: those of known ops agree with ours, those of others are right."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshwright.ir.graph.graph import Graph, Op
from meshwright.ir.graph.rules import Rule
from meshwright.ir.layout.layout import Axis, parse_strategy
from meshwright.ir.trace.loss_module import flatten_batch
from meshwright.ir.trace.trace import trace
from meshwright.planner.discovery import rule as discovery
from meshwright.planner.discovery.apart import explore_apart
from meshwright.planner.discovery.found import DimCut
from meshwright.planner.discovery.probe import Probe, explore
from meshwright.planner.discovery.rule import discovered
from meshwright.planner.discovery.sample import sample
from meshwright.planner.inside.factors import AxisKind, natural_splits, split_strategy
from meshwright.planner.strategies import find_rule, known_rule
from meshwright.testing.models import CASES
from tests.own_operator import WithOwnOperator, batch
from tests.planner.simulated_ops import check_strategy, run_whole, whole_of
from tests.traces import zoo_graph

MODELS = ("gpt2", "bert_mlm", "dlrm", "vgg19", "mixtral")
TWO = AxisKind(2)


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path) -> Path:
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path))
    monkeypatch.setattr(discovery, "_SEEN", {})
    return tmp_path


def splits(op: Op, rule: Rule | None, graph: Graph, axis: AxisKind = TWO) -> set[str]:
    """The strategies of the rule's splits."""
    if rule is None:
        return set()
    found = natural_splits(op, rule, axis, {})
    return {str(split_strategy(op, rule, graph, split, axis)) for split in found}


@pytest.mark.sampled
@pytest.mark.parametrize("name", MODELS)
def test_of_known_ops_known_splits_are_found_or_other_right_ones(name: str) -> None:
    case = CASES[name]
    model, batch = case.model(), case.example()
    graph = zoo_graph(case)
    values = run_whole(graph, model, flatten_batch(batch))
    count, seen = 0, set()
    for op in graph.ops:
        known = known_rule(op, graph)
        kind = str(discovery._key(op, graph)) if op.inputs else ""
        if known is None or kind in seen:
            continue
        seen.add(kind)
        found = splits(op, discovered(op, graph), graph)
        ours = splits(op, known, graph) | splits(op, known, graph, AxisKind(1, graph.batch_size))
        for extra in sorted(found - ours):
            whole = whole_of(op, graph, values)
            check_strategy(op, graph, whole, parse_strategy(extra), "tp", Axis(2))
        count += len(found & ours)
    assert count > 5


def own_op() -> tuple[Graph, Op]:
    samples = batch(8, torch.Generator().manual_seed(0))
    graph = trace(WithOwnOperator(), samples, F.cross_entropy)
    return graph, next(op for op in graph.ops if op.target.startswith("zootest."))


def test_samples_and_channels_of_an_own_operator_are_found(own_cache: Path) -> None:
    graph, op = own_op()
    rule = find_rule(op, graph)
    assert splits(op, rule, graph) == {"S(0) R|P -> S(0)", "S(2) S(0) -> S(2)"}
    assert rule and rule.linear == (frozenset({0}),)
    (file,) = (own_cache / "rules").iterdir()
    assert json.loads(file.read_text())["key"]["target"] == "zootest.spread.default"


def test_what_is_kept_is_confirmed_before_it_is_used(own_cache: Path) -> None:
    graph, op = own_op()
    find_rule(op, graph)
    (file,) = (own_cache / "rules").iterdir()
    held = json.loads(file.read_text())
    # As if it had been tried before its author let it look along s.
    held["cuts"].append({"inputs": [1, None], "outputs": [1]})
    file.write_text(json.dumps(held))
    discovery._SEEN.clear()
    assert splits(op, find_rule(op, graph), graph) == {"S(0) R|P -> S(0)", "S(2) S(0) -> S(2)"}


class Crashing(nn.Module):
    """Its kernel reads beyond its operands where they do not fit each other."""

    def __init__(self) -> None:
        super().__init__()
        self.v, self.g = nn.Parameter(torch.randn(32, 16, 16)), nn.Parameter(torch.randn(1, 1, 16))
        self.head = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        weight = torch._weight_norm(self.v, self.g, 2)
        return self.head(x + weight.sum((1, 2)))  # type: ignore[no-any-return]


def test_a_kernel_that_crashes_is_tried_apart() -> None:
    batch = torch.randn(4, 32), torch.zeros(4, dtype=torch.int64)
    graph = trace(Crashing(), batch, F.cross_entropy)
    op = next(op for op in graph.ops if "_weight_norm" in op.target)
    assert splits(op, find_rule(op, graph), graph) == {"S(2) S(2) -> S(2)"}


def test_harm_that_shows_later_is_not_blamed_on_what_was_tried_then(monkeypatch) -> None:
    """As if each split that does not hold corrupted the memory of its process."""
    graph, op = own_op()
    small = sample(op, graph)
    assert small
    expected, tries, here = explore(small), Probe.holds, os.getpid()
    assert len(expected.cuts) == 2
    harmed = []

    def holds(probe: Probe, cut: DimCut) -> bool:
        if harmed and os.getpid() != here:
            os.kill(os.getpid(), signal.SIGKILL)
        found = tries(probe, cut)
        if not found:
            harmed.append(cut)
        return found

    monkeypatch.setattr(Probe, "holds", holds)
    assert explore_apart(small) == expected
    assert not harmed


class Targets(nn.Module):
    """A loss that is zero unless its targets are 1 or -1, and a product of complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.turn = nn.Linear(6, 6), nn.Parameter(torch.randn(3, 2))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        made = self.linear(x)
        turned = torch.fft.irfft(
            torch.view_as_complex(made.view(-1, 3, 2)) * torch.view_as_complex(self.turn), n=6
        )
        return {"loss": F.cosine_embedding_loss(made, turned, y)}


def test_a_trial_that_makes_zeros_only_proves_nothing() -> None:
    """The mean over samples is no sum of means, which zeros do not tell."""
    batch = {"x": torch.randn(8, 6), "y": torch.ones(8)}
    graph = trace(Targets(), batch)
    op = next(op for op in graph.ops if "cosine_embedding_loss" in op.target)
    assert not splits(op, find_rule(op, graph), graph)


def test_complex_values_have_gradients_that_trials_check() -> None:
    graph = trace(Targets(), {"x": torch.randn(8, 6), "y": torch.ones(8)})
    op = next(op for op in graph.ops if "fft" in op.target)
    assert all(graph.tensors[name].requires_grad for name in (*op.inputs, *op.outputs))
    small = sample(op, graph)
    assert small and any(small.trial.live)
    assert all(g is not None and bool(g.any()) for g in Probe(small).grads)
    assert splits(op, find_rule(op, graph), graph) == {"S(0) -> S(0)"}

"""Traces of the zoo are found by all processes of a run, and by nobody else."""

from dataclasses import replace

import torch

from meshwright.ir.graph.graph import Graph
from meshwright.ir.trace.trace import trace
from meshwright.testing.models import CASES, ModelCase
from meshwright.testing.spawn import alone
from tests import traces
from tests.run_folder import FOLDER

CASE = CASES["vgg19"]
BATCH = 3
"""So many has no other test."""


def _graph(case: ModelCase, may_trace: bool) -> Graph:
    if not may_trace:
        traces._anew = None  # type: ignore[assignment]
    return traces.zoo_graph(case, BATCH)


def test_a_fork_finds_what_another_has_traced(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER, str(tmp_path))
    first = alone(_graph, CASE, True)
    found = alone(_graph, CASE, False)
    assert found == replace(first, meta=found.meta) and found.meta == first.meta
    example = CASE.example(BATCH)
    again = trace(CASE.model(), example, CASE.loss_fn)
    assert found == replace(again, meta=found.meta)
    assert len([*tmp_path.iterdir()]) == 1, "nothing half is left"


def test_what_differs_is_traced_apart(tmp_path, monkeypatch):
    """In batch, numbers, precision or kernels; and a model that only has the name of another."""
    monkeypatch.setenv(FOLDER, str(tmp_path))
    zoo, given = CASES["gpt2"], (BATCH, torch.float32, "", ())
    for one in (given, (BATCH + 1, *given[1:]), (BATCH, torch.float64, "", ()),
                (BATCH, torch.float32, "bf16", ()),
                (BATCH, torch.float32, "", ("cross_entropy",))):  # fmt: skip
        graph = traces._traced(zoo, *one)
        assert (graph.batch_size, graph.precision) == (one[0], one[2])
        assert [fusion.kernel for fusion in graph.fusions] == [*one[3]]
    assert len([*tmp_path.iterdir()]) == 5
    other = replace(zoo, build=CASES["llama"].build)
    assert traces._traced(other, *given).fingerprint != traces._traced(zoo, *given).fingerprint
    assert len([*tmp_path.iterdir()]) == 5


def test_without_a_folder_it_is_traced(monkeypatch):
    monkeypatch.delenv(FOLDER)
    monkeypatch.setattr(traces, "_anew", lambda *given: given)
    assert traces._traced.__wrapped__(CASE, BATCH, torch.float64, "", ())[:2] == (CASE, BATCH)

"""Models of the zoo, traced once, and what they compute themselves."""

import copy
from functools import cache

import torch
from torch import Tensor

from meshwright.ir.graph.graph import Graph
from meshwright.ir.trace.loss_module import TrainingStep, flatten_batch
from meshwright.testing.models import CASES, ModelCase
from tests.traces import zoo_graph


@cache
def traced(name: str) -> tuple[ModelCase, torch.nn.Module, Graph]:
    case = CASES[name]
    model = case.model()
    return case, model, zoo_graph(case)


@cache
def wanted(name: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of the model itself."""
    case, model, _ = traced(name)
    own, batch = copy.deepcopy(model), flatten_batch(case.example())
    loss = TrainingStep(own, case.loss_fn, tuple(batch))(*batch.values())
    loss.backward()
    grads = {n: p.grad for n, p in own.named_parameters() if p.grad is not None}
    return loss.detach(), grads

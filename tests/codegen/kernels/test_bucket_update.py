"""Optimizer steps of our kernel are torch's, over several steps; and what it has no step for."""

import pytest
import torch
from torch import nn

from meshwright.ir.errors import PlanError
from meshwright.ir.kernels import bucket_update
from meshwright.runtime.step.updates import stepped_by_kernel
from tests.codegen.kernels.bucket_update_cases import DTYPES, OPTIMIZERS, difference
from tests.interpreted import printed


@pytest.mark.parametrize("index", range(len(OPTIMIZERS)))
def test_by_torch(index):
    for dtype, bound in DTYPES.items():
        assert difference(index, getattr(torch, dtype)) <= bound


def test_by_triton():
    pytest.importorskip("triton")
    taken, found = printed("tests.codegen.kernels.bucket_update_cases")
    assert taken["triton"] and not taken["torch"] and len(found) == 3
    for dtype, errors in found.items():
        assert len(errors) == len(OPTIMIZERS) and max(errors) <= DTYPES[dtype], (dtype, errors)


def test_torchs_state_and_settings_are_kept():
    p = nn.Parameter(torch.ones(3))
    made = stepped_by_kernel(torch.optim.AdamW([{"params": [p], "lr": 0.5}], weight_decay=0.1))
    assert isinstance(made, torch.optim.AdamW)
    assert made.param_groups[0]["lr"] == 0.5 and made.defaults["weight_decay"] == 0.1
    scheduler = torch.optim.lr_scheduler.StepLR(made, 1, 0.1)
    p.grad = torch.ones(3)
    made.step()
    scheduler.step()
    assert made.param_groups[0]["lr"] == pytest.approx(0.05)
    assert made.state_dict()["state"][0].keys() == {"step", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (lambda p: torch.optim.Adam(p, amsgrad=True), "which has no amsgrad: Adam is given"),
        (lambda p: torch.optim.RMSprop(p), "which steps Adam, AdamW, SGD, not RMSprop"),
        (lambda p: torch.optim.SGD(p, differentiable=True), "which has no differentiable"),
    ],
)
def test_what_it_has_no_step_for(made, why):
    with pytest.raises(PlanError, match=why):
        stepped_by_kernel(made([nn.Parameter(torch.ones(3))]))


def test_torch_sees_through_it():
    p, g, m, v = (torch.rand(5) for _ in range(4))
    rows = bucket_update.table([5])
    numbers = bucket_update.adam_numbers(1, 0.1, (0.9, 0.99), 1e-8, 0.0, False, 1.0)
    given = ([p], [g], [m], [v], rows, numbers, torch.ones(()))
    torch.library.opcheck(bucket_update.adam_update, given)
    numbers = bucket_update.sgd_numbers(True, 0.1, 0.9, 0.0, 0.0, False, 1.0)
    given = ([p], [g], [m], rows, numbers, torch.ones(()))
    torch.library.opcheck(bucket_update.sgd_update, given)

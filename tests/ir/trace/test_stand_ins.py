"""What is imported for the first time while a model is traced works as ever afterwards."""

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from meshwright.ir.trace.trace import trace

LATE = """
from torch.autograd.graph import register_multi_grad_hook as many
from torch.func import grad
from torch.nested import nested_tensor as nested
"""


class _Imports(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        import imported_while_tracing  # noqa: F401

        return self.layer(x).sum()


def test_a_file_imported_meanwhile_has_the_functions_of_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "imported_while_tracing.py").write_text(LATE)
    monkeypatch.syspath_prepend(tmp_path)
    trace(_Imports(), (torch.zeros(2, 4),))
    late = sys.modules.pop("imported_while_tracing")
    assert late.grad(torch.sin)(torch.zeros(())) == 1.0
    assert late.nested([torch.zeros(1), torch.zeros(2)]).is_nested
    x, seen = torch.ones((), requires_grad=True), []
    late.many((x,), seen.append)
    x.square().backward()
    assert [float(one) for (one,) in seen] == [2.0]

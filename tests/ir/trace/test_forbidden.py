"""What a trace forbids leaves torch's own tables as they are."""

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import trace_rules

from meshwright.ir.errors import TraceError
from meshwright.ir.trace.forbidden import forbidden
from meshwright.ir.trace.trace import trace


def test_the_compilers_first_use_inside_a_trace_finds_torchs_own_functions() -> None:
    trace_rules.get_torch_obj_rule_map.cache_clear()  # as in a process that compiled nothing yet
    with forbidden():
        rules = trace_rules.get_torch_obj_rule_map()
    assert torch.nested.nested_tensor in rules


class _Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))

    def forward(self, x: Tensor) -> Tensor:
        made = torch.sparse.mm((x @ self.weight).to_sparse(), self.weight)
        return made.square().sum()


def test_sparse_values_in_the_middle_of_a_model_are_refused_in_words() -> None:
    found = r"test_forbidden\.py:\d+: the result of to_sparse\S* is a sparse tensor .*to_dense"
    with pytest.raises(TraceError, match=found):
        trace(_Sparse(), (torch.ones(2, 4),))

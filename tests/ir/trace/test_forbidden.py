"""What a trace forbids leaves torch's own tables as they are."""

import torch
from torch._dynamo import trace_rules

from meshwright.ir.trace.forbidden import forbidden


def test_the_compilers_first_use_inside_a_trace_finds_torchs_own_functions() -> None:
    trace_rules.get_torch_obj_rule_map.cache_clear()  # as in a process that compiled nothing yet
    with forbidden():
        rules = trace_rules.get_torch_obj_rule_map()
    assert torch.nested.nested_tensor in rules

"""Norms that torch has."""

from meshwright.ir.cluster.device import OpClass
from meshwright.ir.graph.op_facts import OpFacts, per_element

FACTS = {
    # On a CPU torch runs it one operator after the other, as we do.
    "aten.rms_norm": OpFacts(
        op_class=OpClass.NORMALIZATION, flops=per_element(6), torch_passes=3.5
    ),
}

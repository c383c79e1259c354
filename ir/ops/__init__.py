"""Facts of operators, one file per family: `FACTS`, by namespace and name (`aten.rms_norm`), and
overload where one differs from the others (`aten.min.other`), or by namespace alone (`mine.*`).

MESHWRIGHT_OPS names folders with more. Operators of fused kernels have theirs in `ir.kernels`.
"""

import sys
from collections.abc import Mapping
from functools import cache

from meshwright.ir.extensions import Files, add_folders
from meshwright.ir.graph.op_facts import OpFacts, joined_facts
from meshwright.ir.kernels import operator_facts

add_folders("MESHWRIGHT_OPS", __path__)
_UNKNOWN = OpFacts()
_FILES = Files(sys.modules[__name__], "family of operators")


@cache
def facts(target: str) -> OpFacts:
    """What files say of an operator, such as `aten.rms_norm.default`; what is assumed of all if
    none speaks of it."""
    name = ".".join(target.split(".")[:2])
    known = _family_facts()
    found = known.get(target) or known.get(name) or known.get(f"{name.split('.')[0]}.*")
    # Kernels bring Triton, which takes its time to import.
    others = {} if found or name.startswith("aten.") else operator_facts()
    return found or others.get(name, _UNKNOWN)


@cache
def _family_facts() -> Mapping[str, OpFacts]:
    modules = (_FILES.load(name) for name in _FILES.names)
    return joined_facts({f"operators {m.__name__}": m.FACTS for m in modules})

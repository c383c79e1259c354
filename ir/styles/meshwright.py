"""Our own runtime, on the libraries of the torch that it needs (2.11 and later)."""

from meshwright.ir.stack_memory import StackMemory
from meshwright.ir.styles import Style

STYLE = Style(
    title="meshwright's runtime",
    packs_rings=True,
    libraries=2026,
    kernels="auto",
    narrow_experts=True,
    pins=(),
    memory=StackMemory(draws_again=True, split_loss_bytes=12),
    reference="runtime/, and constraints.txt for the libraries",
)

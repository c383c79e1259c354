"""What codegen hands to the runtime: per stage of a rank, the blocks to call and what flows."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor, fx

from meshwright.ir.graph.param import Param
from meshwright.ir.layout.conversions import Primitive
from meshwright.ir.layout.layout import Placement
from meshwright.ir.plan.keeping import Keeping

if TYPE_CHECKING:
    from meshwright.codegen.collectives.comm import Comm
    from meshwright.codegen.passes.halves import Halves

TOTALS = "(totals)"
"""Names of the calls that a stage makes before its blocks."""


@dataclass(frozen=True, slots=True)
class BorderValue:
    """A value that crosses a stage border, as a rank of either side has it."""

    name: str
    shape: tuple[int, ...]
    """Local, of one micro-batch."""
    dtype: str
    """As it runs: under autocast that in which its op makes it."""
    requires_grad: bool
    dp: Placement
    """Where its samples lie in the local part."""
    channels_last: bool = False
    """Images that lie so travel so."""
    apart: tuple[str, ...] = ()
    """Model axes that split its samples, too."""
    parts: int = 1
    """Among how many of their ranks."""


@dataclass(frozen=True, slots=True, eq=False)
class BlockCode:
    """The code of all blocks of one pattern in one layout."""

    pattern: str
    module: fx.GraphModule
    """`module(comm, *params, *inputs)` gives a tuple of the outputs."""
    halves: "Halves | None" = None
    """Runs in its place: the same on the micro-batch in two halves."""


@dataclass(frozen=True, slots=True)
class Call:
    """One block run: environment names in, environment names out."""

    block: str
    code: BlockCode
    params: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    whole: str = ""
    """Form of retention of the block as one; empty: `saved` says."""
    saved: Mapping[str, Keeping] = field(default_factory=dict)
    """What becomes of what its ops make for the backward; a node's key is `meta["key"]`."""
    drop: tuple[str, ...] = ()
    """Values that nothing in the stage reads after this call: forget them."""
    follows: bool = False
    """Its halves may begin when those of the call before it are through, one by one."""

    def run(self, comm: "Comm", *tensors: Tensor) -> tuple[Tensor, ...]:
        """Runs the block on its params and inputs. Checkpoint this, not the module: it says which
        block it is, on which the dropout masks depend."""
        comm.block = self.block
        # Not the module itself: that would look for hooks, which nobody sets.
        function = self.code.halves or self.code.module.forward
        outputs: tuple[Tensor, ...] = function(comm, *tensors)
        return outputs


_BRINGS = {
    str(primitive)
    for primitive in (
        Primitive.ALL_GATHER, Primitive.REDUCE_SCATTER, Primitive.ALL_TO_ALL, Primitive.PAD,
    )
}  # fmt: skip


def _brings_samples(node: fx.Node) -> bool:
    """Whether it is a conversion on dp that is no sum, either way."""
    said = {x for x in (node.target, *node.args, *node.kwargs.values()) if isinstance(x, str)}
    return "dp" in said and bool(said & _BRINGS)


@dataclass(frozen=True, slots=True)
class StageProgram:
    """Everything one rank does for one micro-batch in one stage."""

    index: int
    receives: tuple[BorderValue, ...]
    sends: tuple[BorderValue, ...]
    totals: Call | None
    """Local summands of one micro-batch; the runtime sums them over micro-batches and dp once per
    step, and keeps the sums in the environment under the outputs' names."""
    prelude: Call | None
    """Runs before `calls` for each micro-batch; reads graph inputs, constants and totals."""
    calls: tuple[Call, ...]
    inputs: tuple[str, ...]
    """Graph INPUTs it reads (in totals, prelude or calls)."""
    params: tuple[Param, ...]
    loss: str
    """Name of the loss, a summand on dp; empty except in the last stage."""
    source: str
    """The same as readable Python."""
    paired: bool = False
    """Its actions run together with those of another stage, in turns."""

    @property
    def needs_others(self) -> bool:
        """Whether a block needs values of other samples, and not only sums over all of them."""
        return any(
            _brings_samples(node) for call in self.calls for node in call.code.module.graph.nodes
        )

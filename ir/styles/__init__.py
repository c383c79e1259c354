"""Software stacks that a plan may be priced for, one file each; the file name is the key, with
dashes.

A file has `STYLE`, a `Style`: what the stack does that a plan does not say. The usual one is our
own runtime. MESHWRIGHT_STYLES names folders with more. Nothing in a style is fitted to the runs
that a results page reports on.
"""

import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from meshwright.ir.cluster.launching import Casting, Launching
from meshwright.ir.errors import PlanError
from meshwright.ir.extensions import Files, add_folders
from meshwright.ir.graph.graph import DTYPE_BYTES
from meshwright.ir.precision import Precision
from meshwright.ir.stack_memory import NOTHING_MORE, StackMemory

if TYPE_CHECKING:
    from meshwright.ir.plan.plan import Plan

add_folders("MESHWRIGHT_STYLES", __path__)
_FILES = Files(sys.modules[__name__], "style", dashed=True)
STYLES = _FILES.names
OURS = "meshwright"
"""The style of plans that name none."""
ZERO_ONLY = ("sync=zero", "store=zero")
"""Pins of stacks without our forms of synchronisation and our stores."""
COLLECTIVE_S = 1e-4
"""The CPU's part of a collective: torch.distributed's checks, streams and events, and NCCL's
launch, as long as 16 dispatches; assumption."""
USUAL = Launching(collective_s=COLLECTIVE_S)
RESERVED = 0.03
"""What torch's caching allocator has reserved beyond what is allocated at the peak; assumption."""

TokenTo = Literal["expert", "rank", "node", "neighbours"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """How a stack runs what a plan says."""

    title: str
    """The stack and its time, for people."""
    libraries: int
    """Year of the libraries that its kernels come from (`OpCurve.in_runs`)."""
    attention: float = 1.0
    """Its attention takes so many times as long as the kernel of the device's curve."""
    launching: Launching = USUAL
    """What the CPU takes on GPUs."""
    casting: Casting | None = None
    """What casting operands of 8-bit products moves; None: as ours."""
    hides: float = 1.0
    """Share of the work beside collectives that really hides them."""
    regathers: bool = False
    """What sequence parallelism gathered is gathered again in the backward, not kept."""
    stops_early: bool = False
    """A block that is run again for its backward stops once all that the backward needs is there:
    what comes after, such as a layer's last product and its sum, is not run twice."""
    chunks: bool = False
    """Collectives of tensor parallelism go in chunks beside the products that read or make the
    value."""
    balanced: bool = False
    """With context parallelism each rank has an early and a late part of the sequence, so that
    causal attention is shared out evenly."""
    packs_rings: bool = False
    """Rings of attention pack messages and add parts up by operators, as ours do
    (`ir.layout.op_messages.Passes`); without it, what that takes is not known."""
    token_to: TokenTo = "rank"
    """What gets an expert's token once: each expert that it picked, each rank of them, or each node
    of them, whose ranks hand it on to one another. `neighbours`: the same, and its experts are
    numbered one after the other, so that few ranks have them all."""
    travel_shown: float = 1.0
    """Share of the time of tokens' all-to-alls that no work of another micro-batch hides."""
    fused_experts: bool = False
    """Pairs of a token and an expert are put into order, gated and brought back by one kernel
    each."""
    narrow_experts: bool = False
    """Where linear layers have products of 8-bit floats, so do experts."""
    keeps_narrow: bool = False
    """Of what a linear layer with products of 8-bit floats reads, its backward keeps what has been
    cast, not the value."""
    experts_cpu_s: tuple[float, float] = (0.0, 0.0)
    """What the CPU takes for a layer of experts on GPUs, forward and backward, beside its operators
    as counted here: routers of many small ones, modules' own Python, and waits for counts."""
    experts_wait: bool = False
    """In each forward of experts the CPU waits until the device has counted what comes, and only
    then launches what follows: the queue is empty, so that its part of the forward comes on top of
    the device's time instead of beside it."""
    fused_softmax: bool = False
    """What is done to scores of attention before their softmax is part of its kernel."""
    vocab_multiple: int = 1
    """Times ranks of tensor parallelism: what it pads vocabularies to multiples of. Plans have the
    rows of the model that is given, so a model whose rows are not such is refused."""
    loss_bytes: int = 0
    """Bytes for each logit that its loss moves beyond those of PyTorch's, both ways."""
    all_reduces: bool = False
    """Gradients are all-reduced over all replicas where ranks need a part of them only, too."""
    beside_replicas: bool = False
    """Replicas of shards agree block by block beside the last backward, not at its end."""
    blocking_sends: bool = False
    """Messages between stages keep both ends waiting, one after the other."""
    parts_borders: bool = False
    """Of what ranks of tensor parallelism have alike each sends a part to the next stage, whose
    ranks gather it."""
    chain_hop_s: float = 0.0
    """New parameters are broadcast by those who stepped them, one owner after the other, each in a
    chain over all ranks: seconds of a hop at least, of a faster link too. 0: they are gathered."""
    late: tuple[str, ...] = ()
    """Keys of the forms of synchronisation whose gradients leave after the last backward, not
    beside it."""
    bucket_bytes: int | None = None
    """Gradients that are reduced at once; None: as our runtime does."""
    stepped: str = ""
    """Dtype of what its optimizer steps and of that one's state, where blocks read copies; empty:
    that of the plan's precision."""
    variants: tuple[str, ...] = ()
    """Layouts on model axes that it has, of those that `planner/inside/variants.py` names; empty:
    all."""
    kernels: str | tuple[str, ...] = "none"
    """Fused kernels that it has, as `search` takes them, for a model that is yet to be traced;
    `auto`: where they are worth it."""
    pins: tuple[str, ...] = ZERO_ONLY
    """What it always does and has no choice of; a user's pins of the same decision go first."""
    band: float = 1.0
    """What steps of dense models are within, of what their parts' sources say: where whole runs of
    the stack may be calibrated on, the conformal quantile of four fifths of them, of each table the
    largest (`benchmarks.published --part calibration`)."""
    memory: StackMemory = NOTHING_MORE
    """What it holds beside what a plan says."""
    reference: str
    """Where all of this is known from."""

    def numbers(self, precision: Precision) -> Precision:
        """Returns the numbers of a plan's precision as the stack has them."""
        if not self.stepped or not precision.copies:
            return precision
        # Of parameters in one dtype there are no copies: blocks read what the optimizer steps.
        copies = "" if self.stepped == precision.copies else precision.copies
        return replace(precision, copies=copies, stepped=self.stepped, sums="")

    def __post_init__(self) -> None:
        if not 0.0 < self.hides <= 1.0:
            raise PlanError(f"style: hides is {self.hides}; it must be above 0 and at most 1")
        if not 0.0 <= self.travel_shown <= 1.0:
            raise PlanError(f"style: travel_shown is {self.travel_shown}; it must be from 0 to 1")
        if not 0.1 <= self.band <= 10.0:
            raise PlanError(f"style: band is {self.band}; it must be from 0.1 to 10")
        if not 0.1 <= self.attention <= 10.0:
            raise PlanError(f"style: attention is {self.attention}; it must be from 0.1 to 10")
        if not all(0.0 <= seconds <= 1.0 for seconds in self.experts_cpu_s):
            raise PlanError(
                f"style: experts_cpu_s is {self.experts_cpu_s}; both must be from 0 to 1 second"
            )
        if self.stepped and self.stepped not in DTYPE_BYTES:
            raise PlanError(f"style: stepped is {self.stepped!r}, which is no known dtype")
        if not 0.0 <= self.chain_hop_s <= 1.0:
            raise PlanError(f"style: chain_hop_s is {self.chain_hop_s}; it must be from 0 to 1 s")
        if not 0 <= self.loss_bytes <= 1024:
            raise PlanError(f"style: loss_bytes is {self.loss_bytes}; it must be from 0 to 1024")


def style(name: str) -> Style:
    """Returns the style of a key, ours where it is empty; PlanError with the nearest one if there
    is none."""
    found: Style = _FILES.load(name or OURS).STYLE
    return found


def refuse_style(plan: "Plan") -> None:
    """PlanError if a plan is priced for another stack than our runtime."""
    if plan.style and plan.style != OURS:
        raise PlanError(
            f"the plan is priced as {style(plan.style).title} runs it, and its times and memory "
            "are not those of a run here: export it for that stack (`meshwright export`), or "
            "search or complete it again without a style"
        )


def check_style(name: str) -> None:
    """PlanError with the nearest key if `name` is none."""
    if name:
        _FILES.check(name)

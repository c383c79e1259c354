"""What a software stack's memory holds beside what a plan says."""

from dataclasses import dataclass

from meshwright.ir.errors import PlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class LateFrees:
    """Values that reduce-scatters of model axes read are free for the allocator only when the GPU
    has sent them, while the CPU is ahead of it (torch records them on the stream that sends)."""

    ahead_forward: float
    """Blocks that the CPU can be ahead of the GPU in a forward: launches that CUDA queues over
    those of a block."""
    ahead_backward: float
    in_step: bool = False
    """Checks of collectives keep the CPUs in step: no GPU waits for another's CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StackMemory:
    """Amounts of one rank. Those without a unit are bytes per byte of what the optimizer steps."""

    reserved: float = 0.0
    """Share of all that is allocated at the peak that the allocator has reserved beyond it."""
    holds_gradients: bool = False
    """Gradients that a backward makes stay as it makes them until it ends; then they are summed."""
    bucket_copies: float = 0.0
    """Of gradients, where each replica has all of them and of the optimizer's state: buckets of
    torch's DDP."""
    stepping: float = 0.0
    """While the optimizer runs, of what this rank steps."""
    stepping_flat: float = 0.0
    """The same where each replica has whole parameters: gradients in one flat tensor."""
    flat_alone_bytes: int = 0
    """Most that flat buckets of gradients take where no other rank has copies, so that nothing is
    sent: they are made all the same, and their blocks are too small for what the step makes."""
    gathers: tuple[float, float] = (0.0, 0.0)
    """While stepped parts are gathered to whole parameters: of the whole, and of this rank's
    part."""
    gathers_flat: float = 0.0
    """Stays reserved after that, of the whole: one flat tensor that is larger than any block that
    activations leave."""
    norms: float = 0.0
    """While the optimizer runs, of the largest parameter: what its norm is taken of."""
    stepping_bytes: int = 0
    """The same, whatever the parameters: fixed buffers of gradients on their way."""
    stepping_apart: bool = False
    """What the step makes are tensors too large for blocks that activations leave: both stay
    reserved, until memory is short."""
    gradients_apart: bool = False
    """A rank's parts of gradients are made on a stream of their own, whose memory no other stream
    gets: it stays reserved beside what is allocated at the peak, until memory is short."""
    in_place: bool = False
    """Collectives of replicas read gradients and write parameters where they lie, with no flat
    tensor beside them."""
    split_loss_bytes: int = 0
    """Most per logit in a loss's backward, beside what it has kept, where ranks share the classes;
    0: twice the logits, as where they do not. Ours has three of four bytes."""
    loss_hole_bytes: int = 0
    """Per logit, of what a loss's forward frees and whose room is too small for anything that its
    backward makes: it stays reserved, until memory is short."""
    kept_output_bytes: int = 0
    """Per logit of each micro-batch, of what the last stage of a pipeline returns: all are there
    until the step ends."""
    keeps_sent: bool = False
    """What a stage of a pipeline has sent on is kept until its backward is over, as what that
    starts from; ours keeps the graph alone."""
    gathers_rest: bool = False
    """What is no layer is gathered at once and stays so from its first use to its last; its
    gradients go together."""
    late: LateFrees | None = None
    draws_again: bool = False
    """Kernels of dropout on GPUs draw again in the backward: they keep no masks."""
    keeps_packed: bool = False
    """Where queries have as many heads as keys: what attention keeps of queries is a view of one
    tensor, out of which keys and values were copied, and which lives as long."""

    def __post_init__(self) -> None:
        shares = (self.reserved, self.bucket_copies, self.stepping, self.stepping_flat, self.norms,
                  self.gathers_flat, *self.gathers)  # fmt: skip
        sizes = (self.stepping_bytes, self.flat_alone_bytes, self.loss_hole_bytes,
                 self.kept_output_bytes)  # fmt: skip
        if any([not 0.0 <= share <= 16.0 for share in shares]) or min(sizes) < 0:
            raise PlanError(
                f"memory of a style: {self}; each share must be from 0 to 16, and no size below 0"
            )


NOTHING_MORE = StackMemory()
"""Of a stack that holds what a plan says."""

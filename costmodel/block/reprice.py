"""What a walk through a block does at any number of samples: to be priced again at others."""

from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.costmodel.ops.local_values import Where
from meshwright.ir.cluster.device import OpClass
from meshwright.ir.graph.graph import Op
from meshwright.ir.layout.conversions import Conversion
from meshwright.ir.layout.layout import Placement, Strategy

Target = tuple[Placement, ...]
SavedKey = tuple[str, str, Target]
"""A value that is kept, its dtype and its placement."""


@dataclass(frozen=True, slots=True)
class MoveStep:
    """One conversion of a value."""

    name: str
    axis: str
    conversion: Conversion
    whole: int
    """Number of the value as if whole on the axis."""
    before: int
    after: int
    """The same of the value as it is before and after."""
    splits: bool
    """Whether the value is split on the axis before or after."""
    has_gradient: bool


@dataclass(frozen=True, slots=True)
class PricedInput:
    """An input of an op."""

    value: int
    width: int
    """Bytes of an element in the dtype that the op computes in, then in its own."""
    own_width: int
    is_cast: bool
    requires_grad: bool
    is_param: bool
    channels_last: bool
    gradient_width: int
    """Bytes of an element of its gradient: that of a copy which is the op's alone is cast back."""


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """What autograd keeps for an op."""

    name: str
    key: SavedKey | None
    """None where it is there anyway."""
    memory: tuple[str, Target]
    """That of the value, which it may be a copy of in another dtype."""
    value: int
    width: int


@dataclass(frozen=True, slots=True)
class OpStep:
    """One op, with what it reads and makes by number of value."""

    op: Op
    strategies: Mapping[str, Strategy]
    op_class: OpClass
    dtype: str
    places: tuple[tuple[Where, ...], tuple[Where, ...]]
    """Of inputs and outputs."""
    inputs: tuple[PricedInput, ...]
    outputs: tuple[tuple[int, int], ...]
    """Value and width of each."""
    parts: tuple[tuple[int, int, int], ...]
    """What is split of it on each axis: value, dim and whole size."""
    busiest: float
    """The work of the rank with most of it, over the mean, where what a rank has of the op decides
    it: of causal attention whose queries are split, of experts, also whole ones that drop tokens; 0
    elsewhere."""
    is_causal: bool
    channels_last: bool
    has_gradient: bool
    read_again: tuple[int, ...]
    """Inputs that another op has read before."""
    gathered: tuple[tuple[int, int], ...]
    """Value and width of parameters that are made whole for it."""
    backward: tuple[tuple[int, int], ...]
    """Value and width of what its backward reads besides gradients."""
    kept: tuple[SavedTensor, ...]
    comes_cast: bool
    """An operand of a narrow product comes from a norm, or an earlier product has cast it."""
    sends: bool

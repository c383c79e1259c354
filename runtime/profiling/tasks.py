"""What to measure: tasks are data, so that any process can be given them."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from meshwright.ir.plan.plan import ModelMesh, Plan
from meshwright.ir.profile.profile import BlockRecord, OpRecord, OptimizerRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTask:
    """A block as one rank runs it: that of stage `stage` of a plan made to have it alone there."""

    key: str
    pattern: str
    plan: Plan
    stage: int
    dtypes: Mapping[str, str]
    """Of the values that enter it, under the plan's precision."""

    @property
    def samples(self) -> int:
        return self.plan.stages[self.stage].batch_shares[0]

    @property
    def compiled(self) -> bool:
        return self.plan.stages[self.stage].compile

    @property
    def model(self) -> ModelMesh:
        return self.plan.stages[self.stage].model

    @property
    def tp(self) -> int:
        """Ranks of one replica, on whatever model axes."""
        return self.plan.stages[self.stage].model_size

    @property
    def identity(self) -> tuple[type[BlockRecord], str]:
        return BlockRecord, self.key


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskInput:
    """A tensor that an op gets."""

    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool
    is_param: bool
    below: int = 0
    """Whole numbers are below it; 0: they are ones."""
    step: int = 0
    """Whole numbers count up from 0 in such steps."""
    channels_last: bool = False
    """Images whose channels are innermost in memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpTask:
    """An op with the shapes of one rank."""

    key: str
    target: str
    """Of the graph; `call` is what a rank calls for it."""
    call: str
    op_class: str
    args: tuple[tuple[str, object], ...]
    """By name; `ir.graph.op_site.In` stands for operands, `Dtype` and `Device` for these."""
    operands: tuple[TaskInput, ...]
    dtype: str
    flops: float
    moved_bytes: float
    causal: bool = False
    channels_last: bool = False
    """Its results are images of this layout."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Ranks of the mesh's axes; for forms that ask for them."""

    @property
    def identity(self) -> tuple[type[OpRecord], str]:
        return OpRecord, self.key


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerTask:
    """A step of an optimizer over equal tensors of float32."""

    optimizer: str
    num_tensors: int
    nbytes: int

    @property
    def identity(self) -> tuple[type[OptimizerRecord], str, int, int]:
        return OptimizerRecord, self.optimizer, self.num_tensors, self.nbytes


Task = BlockTask | OpTask | OptimizerTask

"""The plan: complete, executable, comparable, hashable, readable data.

Search makes it, a person may edit it, `ir.plan.verify` checks it, codegen and runtime obey it.
"""

from collections.abc import Mapping
from dataclasses import field
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Literal

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from meshwright.ir.graph.graph import Block, Fusion, Graph
from meshwright.ir.graph.routing import Routing
from meshwright.ir.layout.layout import Axis
from meshwright.ir.plan.keeping import Keeping
from meshwright.ir.plan.predicted import Evidence, Prediction
from meshwright.ir.plan.schedule import Schedule, parse_schedule
from meshwright.ir.text.many import Many

if TYPE_CHECKING:
    from pathlib import Path

    from meshwright.ir.cluster.cluster import Cluster
    from meshwright.ir.plan.finding import Finding

SCHEMA = "meshwright.plan/2.1"
_strict = ConfigDict(extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)
MODEL_AXES = ("cp", "ep", "tp_depth", "tp_row", "tp_col", "tp")
"""Axes that split the samples and tensors of one replica. On all of them any op may be split; on
`cp` parameters are stored whole, on `ep` only those of experts are split."""
DATA_AXES = ("dp", "dp_shard", "dp_replicate")
"""Axes of replicas: both together, and each."""
MESH_AXES = ("pp", "dp_replicate", "dp_shard", *MODEL_AXES)
"""Names a mesh axis may have, outermost first; those of torchtitan, and `tp` in factors."""

Overlap = Literal["none", "gradients", "linear", "block", "blocks"]
OVERLAPS: tuple[Overlap, ...] = ("none", "gradients", "linear", "block", "blocks")
"""In the order of how much goes on beside collectives."""
HALVING: tuple[Overlap, ...] = ("block", "blocks")
"""Of these, those that run blocks on halves of a micro-batch."""
JOINING: tuple[Overlap, ...] = ("gradients", "linear")
"""Of these, those under which products that read one moved value are one call."""

DeviceKind = Literal["cuda", "cpu"]

ModelMesh = tuple[tuple[str, int], ...]
"""Model axes of more than one rank with their sizes, outermost first."""


@dataclass(frozen=True, config=_strict, kw_only=True)
class InputSpec:
    """A model input at the global batch size."""

    name: str
    shape: Many[int]
    dtype: str


@dataclass(frozen=True, config=_strict, kw_only=True)
class ModelId:
    """Which model the plan is for."""

    name: str
    fingerprint: str
    num_parameters: int
    num_blocks: int
    inputs: Many[InputSpec]


@dataclass(frozen=True, config=_strict, kw_only=True)
class ClusterId:
    """Which cluster the plan is for."""

    name: str
    fingerprint: str
    num_devices: int
    device_kind: DeviceKind | None = None
    """What its devices are, if all are alike: a job of a plan for `cpu` runs on CPUs also where
    there is a GPU."""


@dataclass(frozen=True, config=_strict, kw_only=True)
class ProfileId:
    """Which measurements the prediction rests on."""

    machine: str
    """Device, driver, torch version, backend; for people."""
    fingerprint: str


@dataclass(frozen=True, config=_strict, kw_only=True)
class BlockLayout:
    """How the ops of one block pattern are laid out on `dp` and the model axes.

    An axis that is not listed for an op, a parameter or a value means all replicated.
    """

    name: str
    pattern: str
    mesh: dict[str, int]
    """Model axes of more than one rank that it was made for, with their sizes."""
    parameters: dict[str, dict[str, str]]
    """`param_key` -> axis -> placement: `{"attn.c_attn.weight": {"tp": "S(1,outer=3)"}}`."""
    inputs: Many[dict[str, str]]
    """Per `Block.inputs`: axis -> placement on entry."""
    outputs: Many[dict[str, str]]
    """Per `Block.outputs`: axis -> placement on exit."""
    ops: dict[str, dict[str, str]]
    """`Op.key` -> axis -> strategy text, such as `R|P S(1) S(0) -> S(1)`."""

    @property
    def model(self) -> ModelMesh:
        return model_mesh(self.mesh)


def sync_name(zero: int, dp_shard: int) -> str:
    """Returns the form that `Stage.zero` is short for: among one rank nothing is split."""
    return f"zero{zero}" if dp_shard > 1 else "zero0"


Zero = Literal[0, 1, 2, 3]
Setting = int | float | str


@dataclass(frozen=True, config=_strict, kw_only=True)
class FormChoice:
    """A form that a plan names, other than those that `zero` is short for."""

    form: str
    """Name of a file of its folder in `forms`, such as `dear` of `forms/sync`."""
    settings: dict[str, Setting] = field(default_factory=dict)
    """What the form can be told; what is left out is as its file says."""

    def __str__(self) -> str:
        return " ".join([self.form, *(f"{name}={n}" for name, n in sorted(self.settings.items()))])


@dataclass(frozen=True, config=_strict, kw_only=True)
class ParameterChoice:
    """What a stage does with some of its parameters: nothing of it is taken from the stage."""

    zero: Zero = 0
    sync: FormChoice | None = None
    store: FormChoice | None = None
    update: str = ""
    """How they are stepped, a file of `forms/updates`; empty: as the plan's `optimizer`."""

    def __str__(self) -> str:
        said = {"sync": self.sync, "store": self.store, "update": self.update}
        named = [f"{what} {value}" for what, value in said.items() if value]
        return ", ".join([f"zero {self.zero}", *named])


@dataclass(frozen=True, config=_strict, kw_only=True)
class Stage:
    """A run of blocks on a group of devices."""

    first: str
    """Name of the first block."""
    last: str
    """Name of the last block, included."""
    mesh: dict[str, int]
    """Axis sizes in order, outermost first: `{"dp_replicate": 1, "dp_shard": 2, "tp": 2}`."""
    devices: Many[int]
    """Global ranks, row-major over the mesh."""
    batch_shares: Many[int]
    """Samples of each micro-batch on each coordinate of `dp` (dp_replicate x dp_shard)."""
    zero: Zero = 0
    """What is sharded over dp_shard, and over those of cp and ep on which a parameter lies whole:
    1 optimizer, 2 also gradients, 3 also parameters."""
    sync: FormChoice | None = None
    """How replicas agree on gradients, and when; without it, as `zero` says: at the step's end.
    With `dear`, zero 1 gathers parameters and zero 0 gradients under the next forward."""
    store: FormChoice | None = None
    """Where parameters are, a file of `forms/storage`; without it, as `zero` and `sync` say: whole,
    or with zero 3 in shards."""
    by_parameter: dict[str, ParameterChoice] = field(default_factory=dict)
    """Module path of a parameter or pattern of paths -> what is done with it, in place of `zero`,
    `sync`, `store` and the plan's `optimizer`; paths outrank patterns."""
    prefetch: int = 0
    """With zero 3: blocks whose parameters are gathered ahead, while another one runs."""
    recompute: dict[str, Literal["none", "full"]] = field(default_factory=dict)
    """Block name or pattern -> whether its activations are recomputed; names outrank patterns. In
    files names in a row are one: `h.0..11`."""
    saved: dict[str, dict[str, Keeping]] = field(default_factory=dict)
    """Block name or pattern -> `Op.key` or pattern of keys -> what becomes of the values that these
    ops make and the backward needs, where they are not simply kept (`ir.plan.keeping`)."""
    overlap: Overlap = "none"
    """What goes on beside the collectives of model axes. `gradients`: weight gradients of
    column-parallel products, beside the sum of their input's gradient; `linear`: also the second
    half of a row-parallel product; `block`: the second half of the micro-batch, phase by phase;
    `blocks`: the same on from one block to the next. Blocks of which `saved` says something run as
    they are."""
    compile: bool = False
    """Whether `torch.compile` makes kernels of what blocks do between collectives; equal blocks
    share them."""
    capture: bool = False
    """Whether what blocks launch is recorded once, for each micro-batch in flight, in CUDA graphs
    that later micro-batches replay (`ir.plan.captured` says where it may be)."""
    layouts: dict[str, str] = field(default_factory=dict)
    """Block pattern (and `(prelude)`) -> name of a BlockLayout."""

    @property
    def dp(self) -> int:
        return self.mesh.get("dp_replicate", 1) * self.mesh.get("dp_shard", 1)

    @property
    def is_sharded(self) -> bool:
        """Whether its optimizer holds rows of the parameters, and not all."""
        shard = self.mesh.get("dp_shard", 1)
        return sync_name(self.zero, shard) != sync_name(0, shard)

    @property
    def sync_form(self) -> str:
        """Key of the form by which replicas agree on gradients: a file of `forms/sync`."""
        if self.sync is not None and self.dp > 1:
            return self.sync.form
        return sync_name(self.zero, self.mesh.get("dp_shard", 1))

    @property
    def data_axes(self) -> dict[str, int]:
        """Sizes of the data-parallel axes: of both together, and of each."""
        shard, replicate = self.mesh.get("dp_shard", 1), self.mesh.get("dp_replicate", 1)
        return {"dp": self.dp, "dp_shard": shard, "dp_replicate": replicate}

    @property
    def model(self) -> ModelMesh:
        return model_mesh(self.mesh)

    @property
    def model_size(self) -> int:
        """Ranks of one replica."""
        return prod(size for _, size in self.model)

    def axes(self, global_batch_size: int) -> dict[str, Axis]:
        """The layout axes, for `ir.layout.layout.local_shape`."""
        data = Axis(self.dp, self.batch_shares, global_batch_size)
        return {"dp": data} | {axis: Axis(size) for axis, size in self.model}

    def coordinates(self, rank: int) -> dict[str, int]:
        """Coordinates of global `rank` on the layout axes and on dp_replicate and dp_shard."""
        position = self.devices.index(rank)
        found: dict[str, int] = {}
        for axis, size in reversed(self.model):
            position, found[axis] = divmod(position, size)
        replicate, shard = divmod(position, self.mesh.get("dp_shard", 1))
        return {"dp": position, "dp_replicate": replicate, "dp_shard": shard, **found}

    def recomputes(self, block: Block) -> bool:
        return self.recompute.get(block.name, self.recompute.get(block.pattern, "none")) == "full"

    def keeping(self, block: Block) -> dict[str, Keeping]:
        """What `saved` says of a block."""
        return self.saved.get(block.name, self.saved.get(block.pattern, {}))


@dataclass(frozen=True, config=_strict, kw_only=True)
class ScheduleTable:
    """The pipeline schedule as text: one row per pipeline rank, in order of first stage."""

    name: str
    rows: Many[str]

    def parse(self) -> Schedule:
        return parse_schedule(self.name, self.rows)


@dataclass(frozen=True, config=_strict, kw_only=True)
class Plan:
    """How to train one model on one cluster."""

    schema: str = SCHEMA
    model: ModelId
    cluster: ClusterId
    global_batch_size: int
    num_microbatches: int
    optimizer: str
    precision: str
    """A file of `ir/precision`, or one and what modules have in its place: `bf16, head=fp32`."""
    max_grad_norm: float | None = None
    """Gradients are scaled down to this global norm before the optimizer step."""
    method: FormChoice | None = None
    """How parameters are trained where not by gradients and `optimizer`: a file of `forms/methods`,
    such as `admm`."""
    kernels: Many[Fusion] = ()
    """Fused kernels that the model is traced with, for the graph that the plan is for."""
    style: str = ""
    """The software stack that it is priced for, a file of `ir/styles`; empty: our runtime."""
    routing: Many[Routing] = ()
    """Where tokens of layers of experts go, as it is priced; nothing: they are spread evenly."""
    objective: str = "throughput"
    constraints: Many[str] = ()
    stages: Many[Stage]
    schedule: ScheduleTable
    layouts: Many[BlockLayout]
    profile: ProfileId | None = None
    predicted: Prediction | None = None
    evidence: Evidence | None = None
    gives_up: Many[str] = ()
    """What of plain training it changes, for whoever reviews it; nothing: it trains alike."""
    notes: Many[str] = ()
    versions: dict[str, str] = field(default_factory=dict)
    hash: str = ""
    """Of what the plan does: of all but what was predicted, noted and found out about it."""
    seal: str = ""
    """Of the whole content, this key left out: it shows that a file was edited or damaged."""

    @property
    def world_size(self) -> int:
        return len({rank for stage in self.stages for rank in stage.devices})

    @property
    def samples_per_microbatch(self) -> int:
        return self.global_batch_size // self.num_microbatches

    def layout(self, name: str) -> BlockLayout:
        return next(layout for layout in self.layouts if layout.name == name)

    def stage_blocks(self, graph: Graph, index: int) -> tuple[Block, ...]:
        """The blocks of stage `index`, in order."""
        names = [block.name for block in graph.blocks]
        stage = self.stages[index]
        return graph.blocks[names.index(stage.first) : names.index(stage.last) + 1]

    # The functions below live in modules that read this one's types.

    def __str__(self) -> str:
        from meshwright.ir.plan.show import to_text

        return to_text(self)

    def save(self, path: "str | Path") -> None:
        """Write it as canonical JSON."""
        from meshwright.ir.plan.plan_io import save

        save(self, path)

    @classmethod
    def load(cls, path: "str | Path") -> "Plan":
        """Read it; PlanError names what is wrong with the file."""
        from meshwright.ir.plan.plan_io import load

        return load(path)

    def verify(
        self, graph: Graph | None = None, cluster: "Cluster | None" = None
    ) -> "tuple[Finding, ...]":
        """Every rule that the plan breaks."""
        from meshwright.ir.plan.verify import verify

        return verify(self, graph, cluster)


def param_key(block: Block, fqn: str) -> str:
    """The name of a parameter in a layout of the block's pattern: relative to the block."""
    return fqn.removeprefix(block.name + ".")


def model_mesh(mesh: Mapping[str, int]) -> ModelMesh:
    """The model axes of more than one rank, in canonical order."""
    return _model_mesh(tuple(mesh.items()))


@lru_cache(maxsize=4096)
def _model_mesh(axes: tuple[tuple[str, int], ...]) -> ModelMesh:
    sizes = dict(axes)
    return tuple((axis, sizes[axis]) for axis in MODEL_AXES if sizes.get(axis, 1) > 1)


def mesh_size(mesh: dict[str, int]) -> int:
    return prod(mesh.values())

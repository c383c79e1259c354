"""What is said of an operator, once: how it splits, what work it is, what it makes, how it is
called."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal, NamedTuple

from meshwright.ir.cluster.device import OpClass
from meshwright.ir.errors import PlanError
from meshwright.ir.graph.gemm import CountProducts
from meshwright.ir.graph.graph import Arg, Graph, Op
from meshwright.ir.graph.op_site import Form, OpSite
from meshwright.ir.graph.rules import Rule
from meshwright.ir.layout.layout import Strategy
from meshwright.ir.layout.op_messages import FindCopies, FindMessages, FindPasses

Args = Mapping[str, Arg]
Shape = tuple[int, ...]
ShapeOf = Callable[[Arg], Shape]
"""The shape of an argument; () of what is no tensor."""
CountFlops = Callable[[Args, ShapeOf, Shape], int]
"""From arguments by name, their shapes and the shape of the first result."""
Autocast = Literal["by class", "first", "float32", "traced", "inside"]
Shares = Literal["by class", "strided", "if it can", "if it casts nothing"]
Backward = Literal["made", "handed on", "handed on if alike", "shared"]
CountInside = Callable[[Sequence[Shape]], tuple[int, int]]
CountKept = Callable[[Sequence[Shape]], int | None]
"""From the shapes of a rank's operands."""
CountNarrow = Callable[[Sequence[Shape], int, int], int]
"""From the shapes of whole operands, the bytes that were seen, and the width of a value then."""
CountBackward = Callable[[Op, Sequence[Shape], int, int, str, bool, bool], tuple[int, int]]
"""From an op, the shapes of a rank's operands, bytes that its forward kept inside, the width of a
value, the kind of device, and whether a rank has some of its first weight's rows only and whether
operands are wider than what is multiplied."""
CountTemporaries = Callable[[Op, "CallPart"], int]
CountOwn = Callable[[Op, Sequence[Shape], int, str], tuple[int, int] | None]
"""From an op, the shapes of a rank's operands, the width of a value and the kind of device."""
CountOnCpu = Callable[[Op, Sequence[Shape], str], int | None]
"""From an op, the shapes of a rank's operands and the dtype that it computes in."""
CountCast = Callable[[Op, "CallPart", int], int]
"""From an op, a rank's part of a call, and bytes that it keeps inside where nothing is cast."""
CountAdding = Callable[[Op, "CallPart"], int | None]
"""None: all are made before."""
CountHalves = Callable[[Op, "CallPart"], "CallHalves | None"]
"""None: as one node of autograd, which holds nothing inside."""
CountInner = Callable[[Op, Graph], "tuple[InnerPass, InnerPass]"]
CountShared = Callable[[Op, "CallPart"], tuple[int, int]]
"""Bytes."""
FindCalls = Callable[[Sequence[Shape]], "tuple[InnerCall, ...]"]
"""From the shapes of a rank's operands."""
MakeRule = Callable[[Op, Graph], Rule | None]
MakeForm = Callable[[OpSite, Form], Form]
CountBusiest = Callable[[Op, Strategy, int, Shape], float]
"""Of an op, its strategy on an axis of so many ranks, and the shape of its first input."""
Split = Sequence[tuple[Strategy, int]]
"""An op's strategy on each axis of more than one rank, and how many ranks that has."""
CountPart = Callable[[Op, Sequence[Shape], Split, float, str], float]
"""Of an op, the shapes of its whole operands, how it is split, the busiest rank's work over the
mean and the kind of device."""


@dataclass(frozen=True, slots=True)
class CallPart:
    """A rank's part of a call, as torch's kernels find it."""

    shapes: tuple[Shape, ...]
    """Of its operands."""
    wanted: tuple[bool, ...]
    """Which of these get a gradient."""
    width: int
    """Bytes of a value of its first operand."""
    made_bytes: int
    """Of its results."""
    device_kind: str
    stored: int = 0
    """Bytes of a value of its parameters, where autocast has cast them; 0: as the first operand."""
    dtype: str = ""
    """In which it computes, where its kernels depend on that."""
    kept: int = 0
    """Bytes of this part that a trace saw autograd keep inside of it."""

    def wanted_values(self) -> int:
        """Returns how many values the gradients of its operands have."""
        return sum(prod(s) for s, has in zip(self.shapes, self.wanted, strict=True) if has)


class CallHalves(NamedTuple):
    """Bytes that the backward of a call has inside where it runs in two halves, gradients of values
    before those of parameters: what its forward kept is there to the end of both."""

    first: int
    """Most in the first half, beside the gradient that it is given and those that it makes."""
    kept: int
    """Of these, what the second half begins with."""
    keeps_given: bool
    """Whether that begins with the gradient that the call is given, too."""
    runs_again: bool
    """Whether several nodes of autograd read one of its parameters, so that the second half is all
    of the backward of its block once more (`runtime.stage.split`)."""
    growing: int
    """Most in the second half with gradients of its parameters, of which there are none before."""
    adding: int
    """The same where they are added to those that are there, beside these."""
    adds_early: bool = False
    """Whether a gradient of what it reads is added to one that is there before it has most, in a
    whole backward, too."""


class InnerPass(NamedTuple):
    """What an operator does in small kernels, one after the other."""

    kernels: int
    views: int
    """Calls without a kernel."""
    nbytes: float
    """That the kernels read and write."""
    pages: float = 0
    """Pages of memory that a CPU looks up for them, beyond those that it knows."""

    def times(self, number: int) -> "InnerPass":
        return InnerPass(
            number * self.kernels, number * self.views, number * self.nbytes, number * self.pages
        )

    def on_part(self, share: float) -> "InnerPass":
        """As many calls on a part of the values."""
        return self._replace(nbytes=self.nbytes * share, pages=self.pages * share)


@dataclass(frozen=True, slots=True)
class InnerCall:
    """An operator that another one calls."""

    target: str
    operands: tuple[int | Shape, ...]
    """Inputs of the other one by number, or shapes of what the call before made."""
    made: Shape
    flops: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OpFacts:
    """What search, cost model and emitted code know of one operator."""

    op_class: OpClass = OpClass.ELEMENTWISE
    """Which curve of a device says how long it takes."""
    class_of_call: Callable[[Op], OpClass] | None = None
    """The same where its arguments decide it."""
    rule: MakeRule | None = None
    """How its dims may be split; without one that is found by trying it."""
    flops: CountFlops | None = None
    """Of one forward; without it, one for each element of the largest operand."""
    counted_by_running: bool = False
    """Its flops are those of the products that a run of it on the trace's tensors makes."""
    autocast: Autocast = "by class"
    """The dtype of its results where torch.autocast leaves it alone (`ir.graph.autocast`): as its
    class has it if it is ours, else what promotion says; that of its first input; a fixed one;
    that of the trace; or that of its first input though it computes as autocast says, of operands
    that it casts itself."""
    shares: Shares = "by class"
    """Whether its result is memory of its first input: if its class is that of views, with other
    strides than the input's, only if those of the input allow it, or if both have one dtype."""
    fused: bool = False
    """It takes values as they are, since autocast does not know it, and makes all gradients in one
    pass."""
    scaled: Literal["", "tensor", "row"] = ""
    """What of an operand has a scale of its own, where operands of its products are scaled and cast
    to those of the plan's precision."""
    products: CountProducts | None = None
    """The matrix products that it consists of."""
    made_of: FindCalls | None = None
    """The calls that it is made of, which it is then priced as. What one makes for the next is not
    kept: the backward makes all but the last again."""
    one_by_one: CountInner | None = None
    """What one forward calls inside, many times and one after the other, of whole operands; and
    what its gradients take when all of that was made again. It is priced as these, without a class
    of its own."""
    backward: Backward = "made"
    """Whether gradients of its inputs are made by a kernel, are that of its result or views of it
    (if the inputs are all as large as that), or are one that all of them get."""
    logarithms: bool = False
    """It writes a table as large as its first input, and a gradient of that before the input's."""
    mixes_samples: bool = False
    """Its results depend on all samples of a micro-batch, and it changes statistics of them."""
    by_batch: bool = False
    """A rank calls something else where replicas share the batch."""
    shared: CountShared | None = None
    """What that has inside of its forward, beside operands and results, and inside of its backward;
    None: what torch's own has."""
    redrawn: bool = False
    """What autograd keeps inside of it is random: our kernels of GPUs draw it again instead."""
    kernel_keeps: CountKept | None = None
    """From the shapes of its operands, bytes that its kernel on GPUs keeps beside these and the
    result, where torch's on a CPU, which a trace asks, keeps others; None: the same."""
    torch_passes: float = 1.0
    """What a CPU moves for it over what its kernel would: counted in its way by torch, which runs
    one operator after the other."""
    inside: CountInside | None = None
    """Values that it makes and reads inside of each call, forward or backward, and how many of them
    are there at once; without it, none."""
    narrows: CountNarrow | None = None
    """Of what a trace saw autograd keep inside of it, bytes that follow autocast's dtype; without
    it, none."""
    backward_inside: CountBackward | None = None
    """The most bytes that its backward has inside of it at once, beside what the forward kept, the
    gradient that it is given and those that it makes: before it makes those of parameters, and as
    it does; without it, those of `inside`."""
    temporaries: CountTemporaries | None = None
    """Bytes that torch's own backward holds inside, beside the same, of an operator whose shapes or
    arguments say it; without it, what a table says for each element (`ir.graph.temporaries`)."""
    lets_go: bool = False
    """When that backward has most, the gradient that it was given has gone, if nobody else has it.
    """
    widens: bool = False
    """On a CPU it makes float32 of what it reads, and keeps that in place of it."""
    temporaries_before: CountTemporaries | None = None
    """The same before there is a gradient of its parameters; without it, never more."""
    temporaries_adding: CountAdding | None = None
    """The same with gradients of its parameters, where each is added to one that is there as soon
    as it is made; without it, all are made before."""
    halves: CountHalves | None = None
    """What it has in the halves of a backward that is split, where torch makes many nodes of it;
    without it, it is one node, which has inside what it has in a whole backward."""
    forward_inside: CountTemporaries | None = None
    """Bytes that torch's own forward holds inside, beside operands and results; without it, none.
    """
    inside_to_end: bool = False
    """These are there until the forward ends, so beside all that it keeps."""
    cpu_keeps: CountOnCpu | None = None
    """Bytes that torch's kernel on CPUs keeps inside for the backward, beside operands and its
    first result, where a trace cannot ask it; None for a call that another kernel computes."""
    turned: Callable[[Op], bool] | None = None
    """Whether its first result lies with the steps before the samples, though it is read with the
    samples before the steps; without it, never."""
    cpu_casts: CountCast | None = None
    """Bytes that torch keeps inside of it on CPUs where autocast casts what it reads, and it is
    many calls; without it, what `narrows` says."""
    own_bytes: CountOwn | None = None
    """Bytes that our way of computing it keeps for the backward in place of its results, and the
    most that it has at once beside these; None for a call that is computed as torch does."""
    messages: FindMessages | None = None
    """What ranks that have parts of its operands send each other inside of it."""
    passes: FindPasses | None = None
    """Where it sends messages: what our runtime moves in memory for them, on a rank."""
    copies: FindCopies | None = None
    """Where it sends messages: inputs of which its backward keeps a copy of its own, and its bytes
    on the busiest rank."""
    done: Callable[[Op], float] | None = None
    """What it does of the work that its arguments tell, where something else is known of that."""
    busiest: CountBusiest | None = None
    """The work of the rank with most of it over the mean, where that depends on which parts a rank
    has; 0 where it does not. Without it, all parts of a size are equally much."""
    kept: CountPart | None = None
    """Of what a trace saw autograd keep inside of it, what the busiest rank keeps, over an equal
    part of all; without it, as much as its work is over the mean."""
    form: MakeForm | None = None
    """From the call as the graph has it to the one that a rank makes on its part."""


def per_element(count: int) -> CountFlops:
    """Count so many for each element of the first result."""
    return lambda args, of, out: count * prod(out)


NO_FLOPS = per_element(0)
"""Of what only moves data."""


def named(names: str, facts: OpFacts) -> dict[str, OpFacts]:
    """The same facts for several operators of torch."""
    return dict.fromkeys([f"aten.{name}" for name in names.split()], facts)


def joined_facts(files: Mapping[str, Mapping[str, OpFacts]]) -> Mapping[str, OpFacts]:
    """Put the facts of several files into one table; PlanError where two speak of one operator."""
    found: dict[str, OpFacts] = {}
    said: dict[str, str] = {}
    for file, facts in files.items():
        for name, one in facts.items():
            if name in found:
                raise PlanError(
                    f"{file}: it says what {name} is, and so does {said[name]}; keep one of them"
                )
            if name.count(".") not in (1, 2):
                raise PlanError(
                    f"{file}: {name!r} is no operator; write its namespace and its name, such as "
                    "'aten.add', and its overload if others differ, such as 'aten.min.other'"
                )
            found[name], said[name] = one, file
    return found

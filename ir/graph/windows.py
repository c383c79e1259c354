"""Windows that slide over a dim: which elements of the input the parts of an output read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshwright.ir.graph.graph import Op, Tensor

CONVOLUTIONS = frozenset(["conv1d", "conv2d", "conv3d", "convolution"])
POOLS = frozenset("max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d".split())

Span = tuple[int, int]
"""First element and one past the last; outside the input where windows reach into padding."""
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Window:
    """A window along one dim."""

    kernel: int
    stride: int
    padding: int
    """Before the first element; behind the last there is as much as the windows reach."""
    dilation: int

    def reads(self, start: int, stop: int) -> Span:
        """What the outputs from `start` to `stop` read."""
        first = start * self.stride - self.padding
        return first, first + (stop - start - 1) * self.stride + self.reach

    @property
    def reach(self) -> int:
        """From the first element of a window to one past its last."""
        return self.dilation * (self.kernel - 1) + 1


def convolves_channels_last(op: Op, tensors: Mapping[str, Tensor]) -> bool:
    """Whether it is a convolution that the model has made of images with their channels innermost:
    its kernel follows its images or its weight, and its results tell."""
    return op.target.startswith("aten.conv") and tensors[op.outputs[0]].channels_last


def windows(op: Op, shapes: Sequence[Shape], output: Shape) -> tuple[Window | None, ...]:
    """One for each spatial dim, None where the edge cannot be told from padding; none at all for
    other ops. `shapes` are those of the inputs; only sizes of spatial dims matter."""
    space, name, *_ = op.target.split(".")
    if space != "aten" or name not in CONVOLUTIONS | POOLS:
        return ()
    args = dict(op.args)
    if args.get("transposed"):
        return ()
    if name in CONVOLUTIONS:
        kernel: object = shapes[1][2:]
    else:
        kernel = args["kernel_size"]
    dims = len(shapes[1]) - 2 if name in CONVOLUTIONS else int(op.target.split("pool")[1][0])
    kernels = _ints(kernel, dims)
    strides = _ints(args.get("stride") or kernel, dims)
    dilations = _ints(args.get("dilation", 1), dims)
    padding = args.get("padding", 0)
    if isinstance(padding, str):
        reaches = [d * (k - 1) for d, k in zip(dilations, kernels, strict=True)]
        if padding == "same" and any(reach % 2 for reach in reaches):
            return (None,) * dims
        padding = tuple(r // 2 for r in reaches) if padding == "same" else 0
    paddings = _ints(padding, dims)
    found = tuple(map(Window, kernels, strides, paddings, dilations))
    if not name.startswith("avg"):
        return found
    sizes = zip(found, shapes[0][-dims:], output[-dims:], strict=True)
    counts = bool(args.get("count_include_pad", True)) or bool(args.get("divisor_override"))
    return tuple(w if (counts or not w.padding) and _fits(w, *s) else None for w, *s in sizes)


def _fits(window: Window, size: int, output: int) -> bool:
    """Whether the last window ends in the padding: an average counts its elements."""
    return window.reads(0, output)[1] <= size + window.padding


def _ints(value: object, dims: int) -> tuple[int, ...]:
    given = value if isinstance(value, tuple) else (value,)
    numbers = tuple(int(str(n)) for n in given)
    return numbers * dims if len(numbers) == 1 else numbers


def spans(sizes: Sequence[int]) -> tuple[Span, ...]:
    """Where the parts of these sizes lie, one after the other."""
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return tuple((end - size, end) for size, end in zip(sizes, ends, strict=True))


def common(first: Span, second: Span) -> Span:
    """What lies in both; empty where they do not meet."""
    start, stop = max(first[0], second[0]), min(first[1], second[1])
    return start, max(start, stop)


def sent(held: Sequence[Span], needed: Sequence[Span]) -> int:
    """Elements that the busiest part hands to others, so that each has what it needs."""

    def handed(rank: int) -> int:
        others = [common(held[rank], n) for i, n in enumerate(needed) if i != rank]
        return sum(stop - start for start, stop in others)

    return max(map(handed, range(len(held))))

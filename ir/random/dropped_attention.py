"""Attention whose chances are dropped by counted numbers, as an operator that keeps no scores.

The number of a chance is that of its place in the whole batch (`ir.layout.numbering`), as CPUs draw
it, so that masks do not depend on who has which heads or samples. `ir.random.attention_kernels` has
its kernels.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwright.ir.graph.own_operators import LIBRARY
from meshwright.ir.launch import INTERPRETED, way, why_torch, wide
from meshwright.ir.random.attention_kernels import ADDED, LOOKS, NO_MASK
from meshwright.ir.random.attention_tiles import (
    FORWARD,
    KERNELS,
    KEYS,
    QUERIES,
    at_once,
    attention_tile,
    head_room,
)
from meshwright.ir.random.chances import LEAST_WIDTH, MOST_WIDTH
from meshwright.ir.random.dropout import NUMBERED
from meshwright.ir.random.philox import least_kept
from meshwright.ir.random.strided import RowPlaces, filled, row_places
from meshwright.ir.tiles import Tile, device_of

LIBRARY.define(
    "dropped_attention(Tensor query, Tensor key_, Tensor value, Tensor? mask, bool causal, "
    f"float scale, {NUMBERED}) -> (Tensor, Tensor)"
)
LIBRARY.define(
    "dropped_attention_backward(Tensor grad, Tensor query, Tensor key_, Tensor value, Tensor? mask,"
    f" Tensor out, Tensor total, bool causal, float scale, {NUMBERED}) -> (Tensor, Tensor, Tensor)"
)


class _Setting(NamedTuple):
    """What the three launches have in common: numbers and constants; and their tiles."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    drawn: tuple[Any, ...]
    constants: dict[str, Any]
    tiles: Mapping[str, Tile | None]

    def grid(self, kernel: str, length: int, count: int) -> tuple[int, int]:
        """Give the programs of one: of all tiles of rows, of so many heads."""
        return -(-length // self._tile(kernel).rows), count

    def _tile(self, kernel: str) -> Tile:
        found = self.tiles[kernel]
        assert found is not None, "why_not must have been asked"
        return found

    def launch(self, kernel: str) -> dict[str, Any]:
        """Give the constants of one."""
        own = self._tile(kernel)
        more = {"num_warps": own.warps, "num_stages": own.stages}
        return {**self.constants, **at_once(kernel, own), **more}


def why_not(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, first: int,
    sizes: Sequence[int], strides: Sequence[int], per_sample: int = 0,
) -> str:  # fmt: skip
    """Why there is no kernel for such operands [b, h, l, e], [b, g, s, e] and such numbers; "" if
    there is one."""
    widths = query.shape[-1], value.shape[-1]
    if query.ndim != 4 or key.ndim != 4 or value.shape[:-1] != key.shape[:-1]:
        return "operands are not [samples, heads, length, width], or keys are not as many as values"
    if query.shape[0] != key.shape[0] or query.shape[1] % key.shape[1]:
        return "samples share keys, or heads of keys do not divide those of queries"
    for width in widths:
        if not LEAST_WIDTH <= width <= MOST_WIDTH:
            return f"heads are {width} wide, kernels are for {LEAST_WIDTH} to {MOST_WIDTH}"
    if query.element_size() > 2 and not INTERPRETED:
        return "kernels are for float16 and bfloat16"  # tiles of wider values spill
    if mask is not None and (mask.requires_grad or mask.ndim > 4):
        return "the mask wants a gradient, or has more dims than queries"
    if _places(query, key, first, sizes, strides, per_sample) is None:
        return "its part of the batch has too many dims"
    return why_torch(query) or _without_tile(query, value)


def _without_tile(query: Tensor, value: Tensor) -> str:
    """Which kernel has no room for such heads on the device; "" if all have."""
    device, room = device_of(query), head_room(query.shape[-1], value.shape[-1])
    for kernel in KERNELS:
        if attention_tile(device, kernel, room) is None:
            return f"{kernel} has no tile for heads so wide on {device}"
    return ""


def _places(
    query: Tensor,
    key: Tensor,
    first: int,
    sizes: Sequence[int],
    strides: Sequence[int],
    per_sample: int,
) -> RowPlaces | None:
    """Where numbers of chances are, if those of a query follow each other."""
    keys = key.shape[-2]
    count = query.numel() // query.shape[-1] * keys
    found = row_places(first, filled(sizes, count), tuple(strides), per_sample)
    return found if found is not None and (found.flat or found.numbers[0] % keys == 0) else None


def _shaped(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """The mask as [b, h, l, s], without copies of what it has once."""
    return None if mask is None else mask.expand(*query.shape[:-1], key.shape[-2])


def _setting(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float,
    numbered: tuple[Any, ...], tiles: Mapping[str, Tile] | None,
) -> _Setting:  # fmt: skip
    p, seed, first, sizes, strides, held, per_sample = numbered
    where = _places(query, key, first, sizes, strides, per_sample)
    assert where is not None
    _, heads, queries, width = query.shape
    keys, value_width = value.shape[-2:]
    room, device = head_room(width, value_width), device_of(query)
    of_mask = (0, 0, 0, 0) if mask is None else mask.stride()
    kind = NO_MASK if mask is None else LOOKS if mask.dtype == torch.bool else ADDED
    return _Setting(
        (heads, heads // key.shape[1], queries, keys, width, value_width),
        (*query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *of_mask),
        (scale, seed if held is None else held, first, least_kept(p), *where.numbers),
        {
            **room.constants, "WIDE": wide(query.dtype), "CAUSAL": causal, "MASK": kind,
            "WHOLE": where.whole and keys % 16 == 0, "FLAT": where.flat,
        },
        tiles or {kernel: attention_tile(device, kernel, room) for kernel in KERNELS},
    )  # fmt: skip


def _rows_of(x: Tensor) -> Tensor:
    """With the elements of a head beside each other, as kernels read them."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _by_place(like: Tensor, width: int) -> Tensor:
    """[b, h, l, width] that lies as [b, l, h, width], as what is read next wants it."""
    samples, heads, length, _ = like.shape
    return like.new_empty(samples, length, heads, width).transpose(1, 2)


def forward(
    query: Tensor, key_: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float,
    p: float, key: int, first: int, sizes: Sequence[int], strides: Sequence[int],
    held: Tensor | None = None, per_sample: int = 0, tiles: Mapping[str, Tile] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The result [b, h, l, w] and the logarithms of sums [b, h, l], in float32. `tiles`: in place
    of those of the file, to compare them."""
    query, key_, value = (_rows_of(x) for x in (query, key_, value))
    mask = _shaped(mask, query, key_)
    way("dropped_attention", query)
    out = _by_place(query, value.shape[-1])
    total = query.new_empty(query.shape[:-1], dtype=_sums(query))
    numbered = p, key, first, sizes, strides, held, per_sample
    given = _setting(query, key_, value, mask, causal, scale, numbered, tiles)
    count = query.shape[0] * query.shape[1]
    KERNELS[FORWARD][given.grid(FORWARD, query.shape[2], count)](
        query, key_, value, query if mask is None else mask, out, total, *given.sizes,
        *given.strides, *given.drawn, **given.launch(FORWARD),
    )  # fmt: skip
    return out, total


def _sums(query: Tensor) -> torch.dtype:
    return torch.float64 if query.dtype == torch.float64 else torch.float32


def backward(
    grad: Tensor, query: Tensor, key_: Tensor, value: Tensor, mask: Tensor | None, out: Tensor,
    total: Tensor, causal: bool, scale: float, p: float, key: int, first: int,
    sizes: Sequence[int], strides: Sequence[int], held: Tensor | None = None, per_sample: int = 0,
    tiles: Mapping[str, Tile] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of queries, keys and values. `tiles`: in place of those of the file."""
    query, key_, value, grad = (_rows_of(x) for x in (query, key_, value, grad))
    mask = _shaped(mask, query, key_)
    along = (grad.to(_sums(query)) * out).sum(-1).contiguous()
    numbered = p, key, first, sizes, strides, held, per_sample
    given = _setting(query, key_, value, mask, causal, scale, numbered, tiles)
    to_query, to_key, to_value = (_by_place(x, x.shape[-1]) for x in (query, key_, value))
    read = (query, key_, value, query if mask is None else mask, grad, total, along)
    numbers = (*given.sizes, *given.strides, *grad.stride()[:3], *given.drawn)
    samples, heads, queries, _ = query.shape
    KERNELS[QUERIES][given.grid(QUERIES, queries, samples * heads)](
        *read, to_query, *numbers, **given.launch(QUERIES)
    )
    KERNELS[KEYS][given.grid(KEYS, key_.shape[2], samples * key_.shape[1])](
        *read, to_key, to_value, *numbers, **given.launch(KEYS)
    )
    return to_query, to_key, to_value


def _forward_shapes(query: Tensor, _: Tensor, value: Tensor, *__: Any) -> tuple[Tensor, Tensor]:
    total = query.new_empty(query.shape[:-1], dtype=_sums(query))
    return _by_place(query, value.shape[-1]), total


def _backward_shapes(
    grad: Tensor, query: Tensor, key_: Tensor, value: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    found = [_by_place(x, x.shape[-1]) for x in (query, key_, value)]
    return found[0], found[1], found[2]


for _name, _run, _shapes in (
    ("dropped_attention", forward, _forward_shapes),
    ("dropped_attention_backward", backward, _backward_shapes),
):
    LIBRARY.impl(_name, _run, "CUDA")
    if INTERPRETED:
        LIBRARY.impl(_name, _run, "CPU")
    LIBRARY.impl(_name, _shapes, "Meta")
_FORWARD = torch.ops.meshwright.dropped_attention.default
_BACKWARD = torch.ops.meshwright.dropped_attention_backward.default


class DroppedByKernel(torch.autograd.Function):
    """Attention of queries [b, h, l, e] to keys [b, g, s, e] and values [b, g, s, w], g of which
    divides h; mask broadcasts to [b, h, l, s]: bool says where queries look, numbers are added to
    scores. `why_not` must have been asked."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *rest: Any
    ) -> Tensor:
        made: Tensor
        made, total = _FORWARD(query, key, value, mask, *rest)
        ctx.rest = rest
        ctx.save_for_backward(query, key, value, mask, made, total)
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        found = _BACKWARD(grads[0], *ctx.saved_tensors, *ctx.rest)
        return (*found, None, *[None] * len(ctx.rest))

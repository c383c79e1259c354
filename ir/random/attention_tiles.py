"""How much of attention with dropout a program has at once, from the file of tiles; and builds of
its kernels with these.

A tile's `rows` are those that a program makes: queries, or keys where their gradients are made; it
sums over `depth` of the others at a time. Its `columns` are the room for a key and a value side by
side, and it is for heads of at most so many (`most_columns`)."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from meshwright.ir.launch import Build, block, tl
from meshwright.ir.random.attention_kernels import (
    ADDED,
    LOOKS,
    NO_MASK,
    forward_kernel,
    key_kernel,
    query_kernel,
)
from meshwright.ir.random.chances import LEAST_WIDTH
from meshwright.ir.random.strided import NUMBERS
from meshwright.ir.tiles import Tile, tile

WIDTHS = (64, 80, 96, 128, 192, 256)
"""Of heads, whose machine code is read."""
NARROWER = {192: 128}
"""Widths of values where it is not that of keys (DeepSeek's latent attention)."""
ITEM_BYTES = 2
"""Of values that there are kernels for."""
FORWARD, QUERIES, KEYS = "attention_forward", "attention_queries", "attention_keys"
KERNELS = {FORWARD: forward_kernel, QUERIES: query_kernel, KEYS: key_kernel}
"""By their names in the file of tiles."""
_OF_MASK = {NO_MASK: "", LOOKS: "*i1", ADDED: ""}
_LENGTH, _HEADS = 1024, 12
"""Of the sequence and the model that builds are for."""


@dataclass(frozen=True, slots=True)
class HeadRoom:
    """Room for one key and one value of a head: powers of two."""

    keys: int
    values: int

    @property
    def columns(self) -> int:
        """Side by side, as tiles go by it: those of wider values have room for such keys, too."""
        return max(self.keys, self.values) + self.values

    @property
    def constants(self) -> dict[str, int]:
        """Give them as kernels call them."""
        return {"BLOCK": self.keys, "VALUES": self.values}


def head_room(width: int, value_width: int) -> HeadRoom:
    """Returns that of keys and values of a head."""
    return HeadRoom(max(block(width), LEAST_WIDTH), max(block(value_width), LEAST_WIDTH))


def attention_tile(device: str, kernel: str, room: HeadRoom) -> Tile | None:
    """Returns the choice for a kernel; None where none has room."""
    return tile(device, kernel, ITEM_BYTES, room.columns)


def at_once(kernel: str, found: Tile) -> dict[str, int]:
    """Returns how many queries and keys a program has, as kernels call them."""
    queries, keys = (found.depth, found.rows) if kernel == KEYS else (found.rows, found.depth)
    return {"QUERIES": queries, "KEYS": keys}


def build(
    kernel: str, element: str, width: int, value_width: int, mask: int, found: Tile, target: int
) -> Build:
    """Returns a kernel as a launch has it: without a mask it is causal."""
    pointer, pointers = f"*{element}", ("query", "keys", "values")
    room = head_room(width, value_width)
    values = _numbers(width, value_width)
    signature = dict.fromkeys(pointers, pointer) | {"mask": _OF_MASK[mask] or pointer}
    if kernel == FORWARD:
        signature |= {"out": pointer, "total": "*fp32"}
    else:
        signature |= {"grad": pointer, "total": "*fp32", "along": "*fp32"}
        made = ("to_query",) if kernel == QUERIES else ("to_keys", "to_values")
        signature |= dict.fromkeys(made, pointer)
    own = {n: x for n, x in values.items() if kernel != FORWARD or not n.startswith("grad_")}
    signature |= {name: "i32" for name in own if name not in NUMBERS}
    signature |= {"scale": "fp32", "key": "i64", "first": "i64", "least": "i32"}
    signature |= dict.fromkeys(NUMBERS, "i32")
    constants: dict[str, Any] = {
        **at_once(kernel, found), **room.constants, "WIDE": tl.float32,
        "CAUSAL": mask == NO_MASK, "MASK": mask, "WHOLE": True, "FLAT": True,
    }  # fmt: skip
    return Build(
        KERNELS[kernel], signature, constants, own, found.warps, found.stages, looped=True,
        targets=(target,),
    )  # fmt: skip


def _numbers(width: int, value_width: int) -> dict[str, int]:
    """What a launch is told of heads so wide."""
    wide = {"query": width, "key": width, "value": value_width, "grad": value_width}
    steps = {
        f"{of}_{by}": n
        for of, each in wide.items()
        for by, n in (("sample", _LENGTH * _HEADS * each), ("head", each), ("row", _HEADS * each))
    }
    return {
        "heads": _HEADS, "shared": 1, "num_queries": _LENGTH, "num_keys": _LENGTH,
        "head_width": width, "value_width": value_width, **steps,
        "mask_sample": _LENGTH * _LENGTH, "mask_head": 0, "mask_query": _LENGTH, "mask_key": 1,
        "width": _HEADS * _LENGTH * _LENGTH, "middle": 1, "inner": 1, "outer_step": 0,
        "middle_step": 0, "inner_step": 0,
    }  # fmt: skip


def builds(element: str, width: int) -> Iterator[Build]:
    """For heads of `width` in `element`, such as bf16: causal, and with each kind of mask."""
    if element not in ("bf16", "fp16"):
        return
    value_width = NARROWER.get(width, width)
    room = head_room(width, value_width)
    for device, target in (("sm_80", 80), ("sm_90", 90)):
        for kernel in KERNELS:
            found = attention_tile(device, kernel, room)
            for mask in _OF_MASK if found else ():
                assert found is not None
                yield build(kernel, element, width, value_width, mask, found, target)

"""Experts in 8-bit floats as a GPU makes them, by Triton's interpreter: our casts, then torch's
kernel by its own rules for shapes and strides, computed from what it was given.

Prints for each case how far results and gradients lie from the loop's, over their size.
"""

import json
from typing import Any

import torch
from torch import Tensor

from meshwright.ir.graph import grouped, narrow_tokens, scaled_groups
from meshwright.ir.graph.experts import EXPERTS
from meshwright.ir.launch import TAKEN

TOKENS, EXPERT_COUNT, WIDTH, INNER = 29, 3, 48, 16
products: list[int] = []


def kernel(
    left: Tensor, right: Tensor, factors: Tensor, others: Tensor, *, offs: Tensor, out_dtype: Any
) -> Tensor:
    """Torch's kernel: it has none for CPUs, and says of tensors without values what it takes."""
    seen = [x.to("meta") for x in (left, right, factors, others)]
    shape = torch._scaled_grouped_mm(*seen, offs=offs.to("meta"), out_dtype=out_dtype).shape
    products.append(right.ndim)
    made = torch.full(shape, float("nan"), dtype=out_dtype)
    first, second, start = left.float(), right.float(), 0
    for i, end in enumerate(offs.tolist()):
        run = slice(start, end)
        if right.ndim == 3:
            found = first[run] @ second[i] * factors[run, None] * others[i]
            made[run] = found.to(out_dtype)
        else:
            assert start % 16 == 0
            rows, columns = (x.view(len(offs), -1)[i] for x in (factors, others))
            made[i] = (first[:, run] @ second[run] * rows[:, None] * columns).to(out_dtype)
        start = end
    return made


def case(form: str, some: bool, apart: bool) -> float:
    """The largest difference."""
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Tensor:
        made = torch.randn(shape, generator=generator).bfloat16()
        return made.requires_grad_()

    turned = "transposed" in form
    columns = INNER if apart else 2 * INNER
    first = (EXPERT_COUNT, WIDTH, columns) if turned else (EXPERT_COUNT, columns, WIDTH)
    last = (EXPERT_COUNT, INNER, WIDTH) if turned else (EXPERT_COUNT, WIDTH, INNER)
    given: dict[str, Any] = {
        "hidden": draw(TOKENS, WIDTH), "top_k_weights": draw(TOKENS, 2), "gate_up": draw(*first),
        "down": draw(*last), "act": "silu",
    }  # fmt: skip
    if apart:
        given["up"] = draw(*first)
    # Of the second expert there is none; others' experts are beyond.
    index = torch.randint(0, 4, (TOKENS, 2), generator=generator) * 2
    leaves = [x for x in given.values() if isinstance(x, Tensor)]
    results = []
    for by_kernel in (False, True):
        grouped.takes_kernel = lambda *_, by=by_kernel: by
        text = f"{form} some" if some else form
        made = EXPERTS(**given, top_k_index=index, form=text)
        weighed = torch.linspace(-1, 2, made.numel()).view_as(made)
        results.append((made, *torch.autograd.grad((made * weighed).sum(), leaves)))
    return max(
        float((ours - loop).abs().max() / loop.abs().max())
        for loop, ours in zip(*results, strict=True)
    )


def on_their_way() -> list[bool]:
    """Whether rows that are packed and unpacked by our kernels are, bit by bit, what torch's
    operators make: of any size, of zeros, too wide for one program."""
    found = []
    for dtype, width in ((torch.bfloat16, 1040), (torch.float32, 48)):
        rows = torch.randn(7, width, generator=torch.Generator().manual_seed(5)).to(dtype)
        rows *= torch.tensor([1, 2e-20, 3e20, 0, 0.5, 7, 448]).to(dtype)[:, None]
        sent = narrow_tokens.pack(rows)
        come, way = narrow_tokens.unpack(sent, dtype), narrow_tokens.way
        narrow_tokens.way = lambda *_: "torch"
        found += [torch.equal(narrow_tokens.pack(rows), sent)]
        found += [torch.equal(narrow_tokens.unpack(sent, dtype), come)]
        found += [not torch.equal(rows, come), torch.equal(narrow_tokens.rounded(come), come)]
        narrow_tokens.way = way
    return found


def rounded_as_torch() -> None:
    """Triton's interpreter rounds to 8 bits in a way of its own: 125.5 becomes 64, for a carry that
    is lost. Devices and torch round to the nearest even one."""
    from triton.runtime import interpreter

    plain = interpreter._convert_float

    def convert(given: Any, before: Any, after: Any, mode: Any) -> Any:
        if after is not interpreter.tl.float8e4nv:
            return plain(given, before, after, mode)
        assert before is interpreter.tl.float32
        wide = torch.from_numpy(given.view("float32"))
        return wide.to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    interpreter._convert_float = convert


def main() -> None:
    """Prints differences, and how many products the kernel made."""
    rounded_as_torch()
    scaled_groups.SCALED_GROUPED_MM = kernel
    found = {}
    turned = "transposed_first transposed_last"
    for form, some in (
        ("rowwise", True), (f"{turned} tensorwise", False),
    ):  # fmt: skip
        products.clear()
        worst = case(form, some, some)
        found[f"{form} {some}"] = worst, products.count(3), products.count(2)
    taken = TAKEN[narrow_tokens.KERNEL, ""]
    print(json.dumps([found, on_their_way(), TAKEN[narrow_tokens.KERNEL, ""] - taken]))


if __name__ == "__main__":
    main()

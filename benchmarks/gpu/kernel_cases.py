"""Inputs of the fused kernels at widths of real models, and the calls that time them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from meshwright.codegen.attention.dropped import attention
from meshwright.codegen.collectives.comm import Comm
from meshwright.ir.kernels import load_all
from meshwright.ir.kernels.bucket import pack, packed, unpack, unpacked
from meshwright.ir.kernels.bucket import table as bucket_table
from meshwright.ir.kernels.bucket_update import STEPS
from meshwright.ir.kernels.bucket_update import table as update_table
from meshwright.ir.kernels.route import places_of
from meshwright.testing.machine_code import WIDTHS

TOKENS = 8192
HEADS, POSITIONS, SAMPLES = 32, 2048, 4
LAYER = ((4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (4096,))
"""Some of a layer's parameters, of Llama 3 8B."""
RANKS = 8


@dataclass(frozen=True, slots=True)
class KernelCase:
    """One call of ours, the same in plain torch, and what it cannot do without moving."""

    name: str
    ours: Callable[[], object]
    plain: Callable[[], object]
    nbytes: int
    """Inputs read once and results written once; 0 where products bound it."""


Inputs = Callable[[int, str], tuple[Any, ...]]


def _normal(device: str, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device=device)


def _labels(words: int, device: str, tokens: int) -> Tensor:
    return torch.randint(0, words, (tokens,), device=device)


def _angles(positions: int, width: int, device: str) -> tuple[Tensor, Tensor]:
    angle = torch.rand(1, positions, width // 2, device=device).repeat(1, 1, 2)
    return angle.cos().to(torch.bfloat16), angle.sin().to(torch.bfloat16)


def inputs(tiny: bool) -> dict[str, Inputs]:
    """By operator, what makes its inputs for a width on a device; in bfloat16."""
    tokens, heads, positions = (16, 2, 8) if tiny else (TOKENS, HEADS, POSITIONS)
    samples = 1 if tiny else SAMPLES

    def routes(width: int, device: str, *, home: bool) -> tuple[Any, ...]:
        owned = torch.arange(RANKS * tokens).view(RANKS, tokens) % 4 == 1
        owned[0] = True
        to, places = (x.to(device) for x in places_of(owned))
        return _normal(device, len(to) if home else tokens, width), to, places

    return {
        "rms_norm": lambda w, d: (_normal(d, tokens, w), _normal(d, w), 1e-6),
        "add_rms_norm": lambda w, d: (
            _normal(d, tokens, w), _normal(d, tokens, w), _normal(d, w), 1e-6,
        ),
        "add_layer_norm": lambda w, d: (
            _normal(d, tokens, w), _normal(d, tokens, w), _normal(d, w), _normal(d, w), 1e-5,
        ),
        "swiglu": lambda w, d: (_normal(d, tokens, w), _normal(d, tokens, w)),
        "bias_gelu": lambda w, d: (_normal(d, tokens, w), _normal(d, w), True),
        "cross_entropy": lambda w, d: (_normal(d, tokens, w), _labels(w, d, tokens)),
        "cross_entropy_total": lambda w, d: (_normal(d, tokens, w), _labels(w, d, tokens), -100),
        "linear_cross_entropy": lambda w, d: (
            _normal(d, tokens, w), _normal(d, 8 * w, w), _labels(8 * w, d, tokens), -100,
        ),
        "rotary": lambda w, d: (
            _normal(d, samples, heads, positions, w), *_angles(positions, w, d),
        ),
        "route_out": lambda w, d: routes(w, d, home=False),
        "route_home": lambda w, d: routes(w, d, home=True),
    }  # fmt: skip


PRODUCTS = frozenset({"linear_cross_entropy"})
"""Operators that products bound, not memory."""


def cases(tiny: bool, device: str) -> Iterator[tuple[str, Callable[[], KernelCase] | None]]:
    """By name and direction, what makes each case; None: no inputs are known for the operator."""
    known = inputs(tiny)
    for module in load_all():
        widths: Sequence[int] = getattr(module, "WIDTHS", WIDTHS)
        width = 8 if tiny else widths[len(widths) // 2]
        for name, (ours, plain) in getattr(module, "OPERATORS", {}).items():
            make = known.get(name)
            if make is None:
                yield name, None
                continue
            for backward in (False, True):
                title = f"{name} {width}{' backward' * backward}"
                yield title, _maker(title, ours, plain, make, width, device, backward)
    for backward in (False, True):
        title = f"dropped_attention 64{' backward' * backward}"
        yield title, partial(_attending, title, tiny, device, backward=backward)
    yield "bucket pack", lambda: _packing(tiny, device)
    yield "bucket unpack", lambda: _unpacking(tiny, device)
    yield "adam", lambda: _adam(tiny, device)


def _maker(
    title: str, ours: Any, plain: Any, make: Inputs, width: int, device: str, backward: bool
) -> Callable[[], KernelCase]:
    def made() -> KernelCase:
        given = make(width, device)
        case = _backward(title, ours, plain, given) if backward else _forward(
            title, ours, plain, given
        )  # fmt: skip
        return case

    return made


def _tensors(values: Any) -> list[Tensor]:
    found = values if isinstance(values, tuple) else (values,)
    return [x for x in found if isinstance(x, Tensor)]


def _nbytes(values: Sequence[Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in values)


def _forward(title: str, ours: Any, plain: Any, given: tuple[Any, ...]) -> KernelCase:
    made = _nbytes(_tensors(plain(*given)))
    nbytes = 0 if title.split()[0] in PRODUCTS else _nbytes(_tensors(given)) + made
    return KernelCase(title, lambda: ours(*given), lambda: plain(*given), nbytes)


def _backward(title: str, ours: Any, plain: Any, given: tuple[Any, ...]) -> KernelCase:
    """Of results that are kept; angles and labels have no gradients."""
    angles = 1 if title.startswith("rotary") else len(given)

    def ready(function: Any) -> tuple[Callable[[], object], int]:
        own = [
            x.clone().requires_grad_()
            if isinstance(x, Tensor) and x.is_floating_point() and i < angles
            else x
            for i, x in enumerate(given)
        ]
        results = [y for y in _tensors(function(*own)) if y.requires_grad]
        wanted = [x for x in own if isinstance(x, Tensor) and x.requires_grad]
        grads = [torch.randn_like(y) for y in results]
        moved = 2 * _nbytes(wanted) + _nbytes(grads)
        return lambda: torch.autograd.grad(results, wanted, grads, retain_graph=True), moved

    call, moved = ready(ours)
    other, _ = ready(plain)
    return KernelCase(title, call, other, 0 if title.split()[0] in PRODUCTS else moved)


def _attending(title: str, tiny: bool, device: str, *, backward: bool) -> KernelCase:
    """GPT-2's heads, causal, with dropout; beside torch's kernel, which draws for all samples."""
    heads, length, width, p = *((2, 16) if tiny else (12, 1024)), 64, 0.1
    given = [_normal(device, 8, heads, length, width) for _ in range(3)]
    comm = Comm({}, {"tp": 1}, {"tp": 0}, seed=1)
    comm.block, comm.step = "h.0", 0

    def ours(*operands: Tensor) -> Tensor:
        return attention(
            comm, *operands, "attention", None, p, True, rows=1, per_sample=heads * length**2
        )

    def plain(*operands: Tensor) -> Tensor:
        return scaled_dot_product_attention(*operands, None, p, True)

    make = _backward if backward else _forward
    return replace(make(title, ours, plain, tuple(given)), nbytes=0)


def _parameters(tiny: bool, device: str, dtype: torch.dtype) -> list[Tensor]:
    shapes = ((16, 4), (7,)) if tiny else LAYER
    return [torch.randn(shape, device=device).to(dtype) for shape in shapes]


def _bucket(tiny: bool, device: str) -> tuple[list[Tensor], list[int], Tensor]:
    tensors = _parameters(tiny, device, torch.bfloat16)
    chunks = [-(-x.numel() // RANKS) for x in tensors]
    rows = bucket_table([x.numel() for x in tensors], chunks, RANKS).to(device)
    return tensors, chunks, rows


def _packing(tiny: bool, device: str) -> KernelCase:
    tensors, chunks, rows = _bucket(tiny, device)

    def plain() -> Tensor:
        flat = torch.zeros((RANKS, sum(chunks)), device=device)
        return packed(tensors, flat, chunks, 0.5)

    return KernelCase(
        "bucket pack", lambda: pack(tensors, rows, chunks, RANKS, 0.5, torch.float32), plain,
        _nbytes(tensors) + 4 * RANKS * sum(chunks),
    )  # fmt: skip


def _unpacking(tiny: bool, device: str) -> KernelCase:
    tensors, chunks, rows = _bucket(tiny, device)
    flat = torch.randn((RANKS, sum(chunks)), device=device)
    return KernelCase(
        "bucket unpack", lambda: unpack(flat, tensors, rows, chunks),
        lambda: unpacked(flat, tensors, chunks), _nbytes(tensors) + _nbytes([flat]),
    )  # fmt: skip


def _adam(tiny: bool, device: str) -> KernelCase:
    """Beside torch's fused AdamW, which is what plans without the kernel use."""
    params, grads, means, squares = (_parameters(tiny, device, torch.float32) for _ in range(4))
    squares = [x.square() for x in squares]
    rows = update_table([x.numel() for x in params]).to(device)
    numbers = STEPS["adam"].numbers(3, 1e-4, (0.9, 0.999), 1e-8, 0.01, True, 1.0)
    factor = torch.ones((), device=device)
    for parameter, gradient in zip(params, grads, strict=True):
        parameter.grad = gradient
    torchs = torch.optim.AdamW(params, lr=1e-4, fused=True)
    return KernelCase(
        "adam", lambda: STEPS["adam"].update(params, grads, means, squares, rows, numbers, factor),
        torchs.step, 7 * _nbytes(params),
    )  # fmt: skip

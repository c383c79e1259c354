"""Dtypes under autocast, against what torch gives."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.ir.graph.autocast import cast_of, known_names
from meshwright.ir.graph.dtypes import runtime_dtypes
from meshwright.ir.precision import precision
from meshwright.ir.torch_private import fake_mode
from meshwright.ir.trace.trace import trace

# Refused by torch's autocast on GPUs: their products overflow.
BANNED = {"cuda": {"binary_cross_entropy"}, "cpu": set[str]()}
KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}


@pytest.mark.parametrize("kind", KEYS)
def test_the_table_names_what_torchs_dispatcher_casts(kind):
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    every = (name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::"))
    cast = {name[6:].split(".")[0] for name in every if has(name, KEYS[kind])}
    assert known_names(kind) == cast - BANNED[kind]


CALLS = {
    "pow": lambda x, w: x.pow(3),
    "square": lambda x, w: x.square(),
    "exp": lambda x, w: x.exp(),
    "rsqrt": lambda x, w: x.rsqrt(),
    "softplus": lambda x, w: F.softplus(x),
    "tanh": lambda x, w: x.tanh(),
    "softmax": lambda x, w: x.softmax(-1),
    "wide softmax": lambda x, w: x.softmax(-1, dtype=torch.float32),
    "log_softmax": lambda x, w: x.log_softmax(-1),
    "sum": lambda x, w: x.sum(-1, keepdim=True),
    "mean": lambda x, w: x.mean(-1, keepdim=True),
    "prod": lambda x, w: x.prod(-1, keepdim=True),
    "cumsum": lambda x, w: x.cumsum(0),
    "layer_norm": lambda x, w: F.layer_norm(x, (8,), w, w),
    "rms_norm": lambda x, w: F.rms_norm(x, (8,), w),
    "group_norm": lambda x, w: F.group_norm(x, 2, w, w),
    "mse_loss": lambda x, w: F.mse_loss(x, x.tanh()),
    "huber_loss": lambda x, w: F.huber_loss(x, x.tanh()),
    "kl_div": lambda x, w: F.kl_div(x, x.tanh(), reduction="sum"),
    "cat": lambda x, w: torch.cat([x, w.unsqueeze(0)]),
    "times a number": lambda x, w: x * w.sum(),
    "times a row": lambda x, w: x * w,
    "einsum": lambda x, w: torch.einsum("ij,kj->ik", x, w.unsqueeze(0)),
    "pool": lambda x, w: F.avg_pool3d(x.view(1, 1, 1, *x.shape), (1, 2, 2)),
}


class _Calls(nn.Module):
    """One operator behind a product in bfloat16, beside a parameter in float32."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.call, self.ahead, self.w = CALLS[name], nn.Linear(8, 8), nn.Parameter(torch.ones(8))

    def seen(self, x: Tensor) -> Tensor:
        return self.call(self.ahead(x), self.w)

    def forward(self, x: Tensor) -> Tensor:
        return self.seen(x).to(torch.float64).sum()


@pytest.mark.parametrize("name", CALLS)
def test_operators_make_what_torchs_autocast_makes_of_them(name):
    model, x = _Calls(name), torch.randn(4, 8)
    graph = trace(model, (x,), precision="bf16-autocast")
    widened = next(op for op in graph.ops if dict(op.args).get("dtype") == "float64")
    for kind in KEYS:
        found = runtime_dtypes(graph, precision("bf16-autocast"), kind)[widened.inputs[0]]
        assert found == _made_on(kind, name), kind


def _made_on(kind: str, name: str) -> str:
    before = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    torch.set_autocast_dtype(kind, torch.bfloat16)
    torch.set_autocast_enabled(kind, True)
    try:
        with fake_mode():
            x, w = torch.ones(8, 8, device=kind), torch.ones(8, device=kind)
            found = CALLS[name](F.linear(x, x), w).dtype
    finally:
        torch.set_autocast_enabled(kind, before[0])
        torch.set_autocast_dtype(kind, before[1])
    return str(found).removeprefix("torch.")


class Convolutions(nn.Module):
    """Convolution, batch-norm, activation: batch-norm runs in what the convolution gives."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        seen = self.norm(self.conv(x))
        self.dtype = seen.dtype
        return self.fc(seen.relu().mean((2, 3)))  # type: ignore[no-any-return]


def test_batch_norm_keeps_the_dtype_that_it_gets() -> None:
    model, batch = Convolutions(), (torch.randn(4, 3, 8, 8), torch.randn(4, 1))
    graph = trace(model, batch, F.mse_loss)
    with torch.autocast("cpu", torch.bfloat16):
        model(batch[0])
    norm = next(op for op in graph.ops if "batch_norm" in op.target)
    assert model.dtype is torch.bfloat16
    for kind in KEYS:
        assert (
            runtime_dtypes(graph, precision("bf16-autocast"), kind)[norm.outputs[0]] == "bfloat16"
        )
        assert runtime_dtypes(graph, precision("fp32"), kind)[norm.outputs[0]] == "float32"


def test_our_own_operators_are_not_torchs():
    assert cast_of("meshwright.linear.default", "cpu") is None

"""The table of what backwards hold inside, beside what torch makes."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from meshwright.ir.graph.temporaries import temporaries
from meshwright.ir.torch_modes import watching
from meshwright.runtime.record.tensors import TensorTracker

F = torch.nn.functional
SHAPE = (64, 128)
ZEROS = torch.zeros(SHAPE, dtype=torch.bfloat16)
COLUMNS = torch.arange(0, 128, 2)
OF_ONE: dict[str, Callable[[Tensor], Tensor]] = {
    **{
        name: getattr(torch, name)
        for name in "abs acos asin asinh atan atanh cos cosh erf erfc exp exp2 expm1 log "
        "log1p log2 reciprocal rsqrt sigmoid sin sinh sqrt square tan tanh".split()
    },
    "erfinv": torch.erfinv,
    "gelu": F.gelu,
    "silu": F.silu,
    "softplus": F.softplus,
    "pow": lambda x: x**3,
    "amax": lambda x: x.amax(-1),
    "clamp": lambda x: x.clamp(0.2, 0.5),
    "clamp_min": lambda x: x.clamp_min(0.3),
    "cumprod": lambda x: x.cumprod(-1),
    "cumsum": lambda x: x.cumsum(-1),
    "index_select": lambda x: x.index_select(-1, COLUMNS),
    "linalg_vector_norm": lambda x: torch.linalg.vector_norm(x, dim=-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "logcumsumexp": lambda x: x.logcumsumexp(-1),
    "logsumexp": lambda x: x.logsumexp(-1),
    "mse_loss": lambda x: F.mse_loss(x, ZEROS.to(x.dtype)),
    "prod": lambda x: x.prod(-1),
    "softmax": lambda x: x.softmax(-1),
    "sort": lambda x: x.sort(-1)[0],
    "std": lambda x: x.std(-1),
    "topk": lambda x: x.topk(3, -1)[0],
    "var": lambda x: x.var(-1),
}
KEEPS_RESULT = set(
    "cumprod erfinv exp exp2 expm1 linalg_vector_norm log_softmax logcumsumexp logsumexp prod "
    "reciprocal rsqrt sigmoid softmax sqrt std tan tanh topk amax".split()
)
"""What autograd unpacks of these, results or places, is new to a tracker."""
OF_TWO: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "div": torch.div,
    "hypot": torch.hypot,
    "logaddexp": torch.logaddexp,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "mul": torch.mul,
    "pow": torch.pow,
    "atan2": torch.atan2,
}


CASES: list[tuple[str, Callable[..., Tensor], int]] = [
    *((name, make, 1) for name, make in OF_ONE.items()),
    *((name, make, 2) for name, make in OF_TWO.items()),
]


@pytest.mark.parametrize(("name", "make", "count"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_beside_torch(name: str, make: Callable[..., Tensor], count: int, dtype) -> None:
    torch.manual_seed(0)
    given = [(torch.rand(SHAPE) * 0.8 + 0.1).to(dtype).requires_grad_() for _ in range(count)]
    result = make(*given)
    kept = result.grad_fn is not None and name in KEEPS_RESULT
    above, tracker = torch.ones_like(result), TensorTracker([])
    with watching(tracker.see):
        found = torch.autograd.grad(result, given, above)
    tracker.stop()
    largest = given[0].numel()
    made = sum(t.nbytes for t in found) + result.nbytes * kept
    seen = (tracker.peak().peak_bytes - made) / largest
    values, flags = temporaries(f"aten.{name}.default", [True] * count, spread=False)
    assert seen == pytest.approx(values * dtype.itemsize + flags, abs=0.2 * dtype.itemsize)


def test_spread_operands_have_whole_gradients_first() -> None:
    assert temporaries("aten.mul.Tensor", [True, True], spread=True).values == 1
    assert temporaries("aten.add.Tensor", [True, True], spread=True).values == 0
    assert temporaries("aten.div.Tensor", [True, False], spread=False).values == 0
    assert temporaries("mine.erf.default", [True], spread=False).values == 0

"""Weights in few bits: what is kept of them, products with them, and how they split."""

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.adapters.formats import FORMATS
from meshwright.adapters.of_bitsandbytes import of_bitsandbytes
from meshwright.adapters.quantised_linear import QuantisedLinear
from meshwright.ir.errors import PlanError
from meshwright.ir.graph import quantised as op
from meshwright.ir.ops import facts
from meshwright.testing.apart_libraries import with_library

IN, OUT, BLOCK = 48, 20, 16


def plain_linear(base: QuantisedLinear) -> nn.Linear:
    """Returns a plain layer with the values of a quantised one."""
    weight = base.dequantised()
    made = nn.Linear(
        base.in_features, base.out_features, base.bias is not None, weight.device, weight.dtype
    )
    with torch.no_grad():
        made.weight.copy_(weight)
        if base.bias is not None:
            made.bias.copy_(base.bias)
    return made.requires_grad_(False)


def weight(seed: int = 0, out: int = OUT) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(out, IN, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("form", FORMATS)
def test_values_are_the_nearest_that_a_format_has(form: str) -> None:
    """Also of a block of equal values, which is kept exactly where there are zero points."""
    w = weight()
    w[0, :BLOCK], w[1, :BLOCK] = 0.0, 3.25
    layer = QuantisedLinear.of(w, None, form, BLOCK)
    found = layer.dequantised()
    codes = op.unpacked(layer.codes, layer.bits)
    assert codes.shape == (OUT, IN // BLOCK, BLOCK)
    assert layer.codes.nbytes == OUT * IN * layer.bits // 8
    every = torch.arange(2**layer.bits, dtype=torch.uint8).repeat(OUT, IN // BLOCK, 1)
    known = op.dequantised(
        op.packed(every, layer.bits), layer.scale, layer.zero, layer.bits, w.dtype
    ).view(OUT, IN // BLOCK, -1)
    blocks = w.view(OUT, IN // BLOCK, BLOCK)
    best = (blocks.unsqueeze(-1) - known.unsqueeze(-2)).abs().amin(-1)
    off = (found.view_as(blocks) - blocks).abs()
    assert torch.allclose(off, best, atol=1e-12)
    assert (found[0, :BLOCK] == 0).all()
    assert torch.allclose(found[1, :BLOCK], torch.tensor(3.25, dtype=w.dtype), atol=1e-12)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("piece", [1 << 22, 3 * IN])
def test_products_and_gradients_are_those_of_the_wide_weight(
    form: str, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the weight is wide a few rows at a time."""
    monkeypatch.setattr(op, "PIECE", piece)
    layer = QuantisedLinear.of(weight(), torch.randn(OUT, dtype=torch.float64), form, BLOCK)
    plain = plain_linear(layer)
    x = torch.randn(3, 5, IN, dtype=torch.float64)
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    made, wanted = layer(mine), plain(theirs)
    assert torch.allclose(made, wanted, atol=1e-12)
    gradient = torch.randn_like(made)
    made.backward(gradient)
    wanted.backward(gradient)
    assert mine.grad is not None and theirs.grad is not None
    assert torch.allclose(mine.grad, theirs.grad, atol=1e-12)
    torch.library.opcheck(
        op.quantised_linear,
        (mine.detach().view(3, 5, -1, BLOCK).requires_grad_(), layer.codes, layer.scale,
         layer.zero, layer.bits),
    )  # fmt: skip


def test_codes_alone_are_kept_for_the_backward() -> None:
    """The wide weight is not, and inputs are not."""
    layer = QuantisedLinear.of(weight(), None, "int4", BLOCK)
    kept: list[Tensor] = []
    x = torch.randn(4, IN, dtype=torch.float64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        layer(x)
    mine = {layer.codes.data_ptr(), layer.scale.data_ptr(), layer.zero.data_ptr()}  # type: ignore[union-attr]
    assert {t.data_ptr() for t in kept} == mine


def test_scales_that_ask_for_gradients_are_refused() -> None:
    layer = QuantisedLinear.of(weight(), None, "int8", BLOCK)
    layer.scale.requires_grad_(True)
    with pytest.raises(ValueError, match=r"scales and zero points .* leave them frozen"):
        layer(torch.randn(2, IN, dtype=torch.float64, requires_grad=True))


def test_work_inside_is_counted() -> None:
    known = facts("meshwright.quantised_linear.default")
    shapes = [(7, 3, BLOCK), (OUT, 3, BLOCK // 2), (OUT, 3), (OUT, 3)]
    assert known.inside and known.products
    assert known.inside(shapes) == (OUT * IN, OUT * IN)
    wide = [(7, 4096, 64), (4096, 4096, 32), (4096, 4096)]
    assert known.inside(wide) == (4096 * 4096 * 64, op.PIECE // (4096 * 64) * 4096 * 64)
    (product,) = known.products(shapes, 0.0)
    assert (product.m, product.n, product.k) == (7, OUT, IN)


def test_layers_of_bitsandbytes_keep_their_values() -> None:
    """Codes are the same as ours, too, and scales that are quantised themselves are read."""
    with_library("bitsandbytes")
    import bitsandbytes as bnb

    for nested in (False, True):
        plain = nn.Linear(128, 64)
        layer = bnb.nn.Linear4bit(
            128, 64, compute_dtype=torch.float32, quant_type="nf4", compress_statistics=nested
        )
        layer.load_state_dict(plain.state_dict())
        model = nn.Sequential(layer.to("cpu"), nn.ReLU())
        x = torch.randn(5, 128)
        wanted = model(x)
        found = of_bitsandbytes(model)
        assert torch.allclose(found(x), wanted, atol=1e-5)
        ours = QuantisedLinear.of(plain.weight, None, "nf4", 64)
        assert torch.equal(found[0].codes, ours.codes)
    with pytest.raises(PlanError, match="no Linear4bit of bitsandbytes"):
        of_bitsandbytes(nn.Sequential(plain))


class Tied(nn.Module):
    """A table that is read twice, a layer that is trained, one that is not, and a narrow one."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(OUT, IN)
        self.first, self.second = nn.Linear(IN, IN), nn.Linear(IN, IN, bias=False)
        self.narrow = nn.Linear(IN, 10)
        self.back = nn.Linear(10, IN)
        self.head = nn.Linear(IN, OUT, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.second(torch.relu(self.first(self.table(x))))
        return self.head(self.back(self.narrow(h)))  # type: ignore[no-any-return]


def test_a_model_is_quantised_where_it_can_be() -> None:
    model = mw.quantise(Tied(), "int8", block=8, skip="back")
    kinds = {name: type(m).__name__ for name, m in model.named_children()}
    assert kinds == {
        "table": "Embedding", "first": "QuantisedLinear", "second": "QuantisedLinear",
        "narrow": "QuantisedLinear", "back": "Linear", "head": "Linear",
    }  # fmt: skip
    assert model.head.weight is model.table.weight
    assert not any(p.requires_grad for p in model.first.parameters())
    model(torch.tensor([[1, 2]])).sum().backward()
    assert model.table.weight.grad is not None
    # What is trained stays, unless all is.
    other = Tied()
    other.first.requires_grad_(False)
    assert isinstance(mw.quantise(other, block=8).first, QuantisedLinear)
    assert type(other.second) is nn.Linear


def test_what_cannot_be_quantised_is_said_with_what_can() -> None:
    with pytest.raises(PlanError, match=r"back: 10 inputs .*nearest block is 10; or leave it"):
        mw.quantise(Tied(), "int8", block=8)
    with pytest.raises(PlanError, match="'nf3'; nearest is 'nf4'"):
        mw.quantise(Tied(), "nf3")
    with pytest.raises(PlanError, match=r"'frist' names none of .* nearest is 'first'"):
        mw.quantise(Tied(), only="frist")
    with pytest.raises(PlanError, match="48 inputs in blocks of 3 values of 4 bits"):
        mw.quantise(Tied(), only="first", block=3)
    with pytest.raises(PlanError, match="leave none of the 4 linear layers"):
        mw.quantise(Tied(), only="first", skip="first")
    with pytest.raises(PlanError, match="no linear layers that can be quantised"):
        mw.quantise(nn.Sequential(nn.ReLU(), nn.Embedding(3, 4)))


def test_shapes_are_enough_to_plan() -> None:
    with torch.device("meta"):
        layer = QuantisedLinear.of(torch.empty(OUT, IN), torch.empty(OUT), "nf4", BLOCK)
    assert layer.codes.is_meta and layer.codes.shape == (OUT, IN // BLOCK, BLOCK // 2)
    assert layer.scale.dtype is torch.float32 and layer.zero is None

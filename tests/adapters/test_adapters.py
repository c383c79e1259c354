"""Adapters beside linear layers: their identities, and what they merge into."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.adapters.adapted_linear import AdaptedLinear
from meshwright.adapters.kinds import KINDS
from meshwright.adapters.quantised_linear import QuantisedLinear
from meshwright.ir.errors import PlanError

IN, OUT, RANK, BLOCK = 64, 24, 3, 8


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(IN, IN), nn.Tanh(), nn.Linear(IN, OUT)).double()


def trained(model: nn.Module) -> dict[str, Tensor]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def moved(model: nn.Module) -> nn.Module:
    """As after some training."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in trained(model).values():
            p.copy_(0.3 * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return model


def example() -> Tensor:
    return torch.randn(5, IN, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def adapted(kind: str, form: str = "", **more: Any) -> nn.Module:
    model = net()
    if form:
        mw.quantise(model, form, block=BLOCK)
    return mw.adapt(model, kind, rank=RANK, **more)


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_are_zero_at_the_start_and_alone_trained(kind: str) -> None:
    plain = mw.quantise(net(), "int4", block=BLOCK)
    model, x = adapted(kind, "int4"), example()
    assert torch.equal(model(x), plain(x))
    assert {name.rpartition(".")[2] for name in trained(model)} == {"down", "up"}
    moved(model)
    assert (model(x) - plain(x)).abs().max() > 0.1


def test_the_balanced_adapter_has_twice_the_rank_at_the_same_size() -> None:
    ranks, sizes = {}, {}
    for kind in ("lora", "balanced"):
        model = moved(adapted(kind))
        sizes[kind] = sum(p.numel() for p in trained(model).values())
        last = model[2]
        assert isinstance(last, AdaptedLinear)
        change = last.change().repeat_interleave(last.pooled, 1)
        assert change.shape == (OUT, IN)
        ranks[kind] = int(torch.linalg.matrix_rank(change))
    assert sizes["balanced"] == sizes["lora"] == RANK * (IN + IN + IN + OUT)
    assert ranks == {"lora": RANK, "balanced": 2 * RANK}


def test_the_balanced_adapter_by_hand() -> None:
    """Means of two neighbours, two matrices, each output twice, times alpha / rank."""
    layer = adapted("balanced", alpha=7.0)[2]
    moved(layer)
    x = example()
    means = torch.nn.functional.avg_pool1d(x.unsqueeze(1), 2).squeeze(1)
    wanted = layer.base(x) + 7.0 / RANK * (means @ layer.down.T @ layer.up.T).repeat_interleave(
        2, -1
    )
    assert torch.allclose(layer(x), wanted, atol=1e-12)


@pytest.mark.parametrize(
    ("kind", "form"), [("lora", ""), ("balanced", ""), ("pooled", "int4"), ("pooled", "int8")]
)
def test_a_merged_model_computes_the_same(kind: str, form: str) -> None:
    """On quantised weights the codes and scales stay: zero points alone change."""
    model, x = moved(adapted(kind, form)), example()
    wanted, plain = model(x), adapted(kind, form)(x)
    assert (wanted - plain).abs().max() > 0.1
    before = {name: p.clone() for name, p in model.state_dict().items()}
    found = mw.merge(model)(x)
    assert torch.allclose(found, wanted, rtol=0, atol=1e-12)
    assert not any(isinstance(m, AdaptedLinear) for m in model.modules())
    if form:
        assert isinstance(model[2], QuantisedLinear)
        assert torch.equal(model[2].codes, before["2.base.codes"])
        assert torch.equal(model[2].scale, before["2.base.scale"])
        assert not torch.equal(model[2].zero, before["2.base.zero"])


@pytest.mark.parametrize(
    ("kind", "form", "why"),
    [
        ("balanced", "int4", "means of 2 inputs, and a block is of 8"),
        ("pooled", "nf4", "nf4 has no zero points"),
    ],
)
def test_what_does_not_merge_exactly_is_refused(kind: str, form: str, why: str) -> None:
    model = moved(adapted(kind, form))
    before = model(example())
    with pytest.raises(PlanError, match=f"0: .*{why}; nearest is kind 'pooled' on 'int4'"):
        mw.merge(model)
    assert torch.equal(model(example()), before)


def test_weights_that_lie_the_other_way_are_merged_too() -> None:
    from transformers.pytorch_utils import Conv1D

    torch.manual_seed(0)
    model = moved(mw.adapt(nn.Sequential(Conv1D(OUT, IN)).double(), "balanced", rank=RANK))
    wanted = model(example())
    assert torch.allclose(mw.merge(model)(example()), wanted, atol=1e-12)


def test_names_and_shapes_are_checked() -> None:
    model = mw.adapt(net(), only="2", rank=2)
    assert set(trained(model)) == {"2.down", "2.up"}
    with pytest.raises(PlanError, match="has adapters already"):
        mw.adapt(model)
    with pytest.raises(PlanError, match="'balancd'; nearest is 'balanced'"):
        mw.adapt(net(), "balancd")
    with pytest.raises(PlanError, match=r"2: an adapter .* quantise the model first"):
        mw.adapt(net(), "pooled", only="2")
    odd = nn.Sequential(nn.Linear(4, 3))
    with pytest.raises(PlanError, match="0: 3 outputs are not groups of 2; nearest is kind 'lora'"):
        mw.adapt(odd)
    for rank, near in ((0, "nearest is 1"), (2.2, "nearest is 2")):
        with pytest.raises(PlanError, match=f"rank is {rank}.*{near}"):
            mw.adapt(net(), rank=rank)  # type: ignore[arg-type]
    for alpha in (0.0, float("nan")):
        with pytest.raises(PlanError, match=f"alpha is {alpha:g}.*nearest is the rank, 8"):
            mw.adapt(net(), alpha=alpha)
    with pytest.raises(PlanError, match="dropout is 1"):
        mw.adapt(net(), dropout=1.0)
    with pytest.raises(PlanError, match="no adapters to merge"):
        mw.merge(net())

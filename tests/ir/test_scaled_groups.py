"""Grouped products of 8-bit floats: torchao's of each expert alone, and the same by kernels."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshwright.ir.errors import PlanError
from meshwright.ir.graph import scaled_groups
from meshwright.ir.graph.experts import EXPERTS
from meshwright.testing.apart_libraries import with_library
from tests.interpreted import printed

WIDTH, INNER, RUNS = 32, 48, (32, 0, 16)


def values(width: int = WIDTH, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """Tokens of one expert each, whose routing weights are one."""
    generator = torch.Generator().manual_seed(5)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype).requires_grad_()

    index = torch.cat([torch.full((n,), i) for i, n in enumerate(RUNS)])[:, None]
    return {
        "hidden": draw(len(index), width), "top_k_index": index[torch.randperm(len(index))],
        "top_k_weights": torch.ones(len(index), 1, dtype=dtype),
        "gate_up": draw(len(RUNS), 2 * INNER, width), "down": draw(len(RUNS), width, INNER),
        "act": "silu",
    }  # fmt: skip


def gradients(made: Tensor, given: dict[str, Any]) -> tuple[Tensor, ...]:
    weighed = torch.linspace(-1, 2, made.numel()).view_as(made)
    leaves = [given[name] for name in ("hidden", "gate_up", "down")]
    return torch.autograd.grad((made * weighed).sum(), leaves)


def of_torchao(given: dict[str, Any], recipe: str) -> Tensor:
    """Each expert as two of torchao's layers; gradients are e4m3 as in the kernel."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.config import CastConfig

    config = Float8LinearConfig.from_recipe_name(recipe)
    if recipe == "tensorwise":
        narrow = CastConfig(target_dtype=torch.float8_e4m3fn)
        config = Float8LinearConfig(cast_config_grad_output=narrow)
    made = torch.zeros_like(given["hidden"])
    for i, count in enumerate(RUNS):
        if not count:
            continue
        (places,) = torch.where(given["top_k_index"][:, 0] == i)
        x = given["hidden"][places]
        for name in ("gate_up", "down"):
            weight = given[name][i]
            out, into = weight.shape
            plain = nn.Sequential(nn.Linear(into, out, bias=False, device="meta"))
            layer = convert_to_float8_training(plain, config=deepcopy(config))[0]
            x = torch.func.functional_call(layer, {"weight": weight}, (x,))
            if name == "gate_up":
                gate, up = x.chunk(2, -1)
                x = F.silu(gate) * up
        made = made.index_put((places,), x)
    return made


@pytest.mark.parametrize(
    ("recipe", "dtype"), [("rowwise", torch.bfloat16), ("tensorwise", torch.float32)]
)
def test_each_expert_is_as_a_layer_of_torchao(recipe: str, dtype: torch.dtype) -> None:
    """Results, and gradients of tokens and weights; and they are not those without 8 bits. Torchao
    rounds twice where a tensor of bfloat16 has one scale, and makes bfloat16 of float32 by row."""
    with_library("torchao")
    given = values(dtype=dtype)
    # Threads add in any order: a few results in bfloat16 are rounded to the other side.
    bound = 4e-4 if dtype == torch.bfloat16 else 1e-5
    found, wanted = EXPERTS(**given, form=recipe), of_torchao(given, recipe)
    for ours, theirs in zip(
        (found, *gradients(found, given)), (wanted, *gradients(wanted, given)), strict=True
    ):
        assert (ours - theirs).float().norm() < bound * theirs.float().norm()
    plain = EXPERTS(**given)
    assert (plain - wanted).float().norm() > 1e-2 * wanted.float().norm()


def test_by_kernels_they_are_the_same() -> None:
    """Our casts by Triton's interpreter, and torch's kernel by what it says that it takes; within
    one rounding to bfloat16. Four products forward and back and two of runs, or six and three."""
    products, on_their_way, taken = printed("tests.ir.cast_cases")
    assert len(on_their_way) == 8 and all(on_their_way) and taken == 4
    for name, (worst, rows, runs) in products.items():
        assert worst <= 2**-7, name
        assert (rows, runs) == ((6, 3) if name.endswith("True") else (4, 2))


def test_sizes_that_no_kernel_takes_are_as_they_are() -> None:
    given = values(40)
    assert torch.equal(EXPERTS(**given, form="rowwise"), EXPERTS(**given))


def test_what_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PlanError, match="one kind of scale"):
        EXPERTS(**values(), form="rowwise tensorwise")
    with pytest.raises(PlanError, match=r"a token of 42 values .* no place for its scale"):
        EXPERTS(**values(42), form="narrow_tokens")
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (10, 0))
    with pytest.raises(PlanError, match=r"capability 9.0 \(H100, H200\), not 10.0: nearest"):
        scaled_groups.check_device(gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    scaled_groups.check_device(gpu)
    monkeypatch.setattr(scaled_groups, "SCALED_GROUPED_MM", None)
    with pytest.raises(PlanError, match="there is no such torch"):
        scaled_groups.check_device(gpu)


def test_what_is_no_number_stays_none() -> None:
    """And comes into its own expert alone."""
    for form in ("rowwise", "tensorwise"):
        given = values()
        with torch.no_grad():
            given["hidden"][0, 0] = torch.nan
        made = EXPERTS(**given, form=form)
        own = given["top_k_index"][:, 0] == given["top_k_index"][0, 0]
        assert made[0].isnan().all() and not made[~own].isnan().any()

"""The operator of experts: every gate and form against its formula, whatever makes the products."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.ir import torch_private
from meshwright.ir.errors import PlanError
from meshwright.ir.gates import gates, parse_gate, said
from meshwright.ir.graph import grouped
from meshwright.ir.graph.expert_form import ExpertForm, of_some
from meshwright.ir.graph.experts import (
    EXPERTS,
    MADE_OF,
    Operands,
    experts_forward,
)
from meshwright.ir.graph.graph import Op, Ref
from meshwright.ir.graph.routing import Routing, spread_evenly
from meshwright.ir.ops import facts
from meshwright.ir.torch_modes import watching
from meshwright.runtime.record.tensors import TensorTracker

TOKENS, PICKED, EXPERT_COUNT, WIDTH, INNER = 7, 2, 3, 4, 8
INDEX = torch.tensor([[0, 1], [2, 0], [-1, 2], [1, 1], [0, 2], [2, -2], [7, 0]])
"""With pairs of experts that are none, and a token that picked one twice."""
Given = dict[str, Tensor | str]


def given(act: str, form: ExpertForm, *, gated: bool, apart: bool, biased: bool) -> Given:
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

    columns = INNER * (2 if gated and not apart else 1)
    first, last = (EXPERT_COUNT, columns, WIDTH), (EXPERT_COUNT, WIDTH, INNER)
    turned = lambda shape, on: (shape[0], shape[2], shape[1]) if on else shape  # noqa: E731
    found: Given = {
        "hidden": draw(TOKENS, WIDTH), "top_k_weights": draw(TOKENS, PICKED),
        "gate_up": draw(*turned(first, form.transposed_first)),
        "down": draw(*turned(last, form.transposed_last)), "act": act, "form": str(form),
    }  # fmt: skip
    if apart:
        found["up"] = draw(*turned(first, form.transposed_first))
    if biased:
        found["gate_up_bias"] = draw(EXPERT_COUNT, 2 * INNER if gated else INNER)
        found["down_bias"] = draw(EXPERT_COUNT, WIDTH)
    return found


def by_formula(values: Given) -> Tensor:
    """One token and one expert after the other."""
    form = ExpertForm(**dict.fromkeys(str(values["form"]).split(), True))
    rows = []
    for token in range(TOKENS):
        total = torch.zeros(WIDTH, dtype=torch.float64)
        for place, expert in enumerate(INDEX[token].tolist()):
            if not 0 <= expert < EXPERT_COUNT:
                continue
            x, scale = values["hidden"][token], values["top_k_weights"][token, place]
            x = x * scale if form.scaled_input else x
            product = torch.cat([
                x @ (w if form.transposed_first else w.T)
                for w in (values[n][expert] for n in ("gate_up", "up") if n in values)
            ])  # fmt: skip
            if "gate_up_bias" in values:
                product = product + values["gate_up_bias"][expert]
            parts = (product,)
            if len(product) == 2 * INNER:
                cut = (product[::2], product[1::2]) if form.interleaved else product.chunk(2)
                parts = tuple(cut)
            gated = parse_gate(str(values["act"])).forward(tuple(p[None] for p in parts))[0]
            down = values["down"][expert]
            made = gated @ (down if form.transposed_last else down.T)
            made = made + values["down_bias"][expert] if "down_bias" in values else made
            total = total + (made if form.scaled_input else made * scale)
        rows.append(total)
    return torch.stack(rows)


def check(values: Given) -> None:
    """Result and all gradients are those of the formula, whose gradients are autograd's."""
    leaves = [x for x in values.values() if isinstance(x, Tensor)]
    found, expected = EXPERTS(**values, top_k_index=INDEX), by_formula(values)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    weighed = torch.linspace(-1, 2, found.numel(), dtype=torch.float64).view_as(found)
    ours, theirs = (torch.autograd.grad((x * weighed).sum(), leaves) for x in (found, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def test_a_half_of_a_backward_makes_what_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of weights are not made where nobody wants them; all are those of a whole one."""
    values = given("silu", ExpertForm(), gated=True, apart=False, biased=True)
    leaves = {name: x for name, x in values.items() if isinstance(x, Tensor)}
    whole = torch.autograd.grad(EXPERTS(**values, top_k_index=INDEX).sum(), list(leaves.values()))
    made = list[int]()
    outer = Operands.outer

    def counted(*args: Any) -> Tensor:
        made.append(1)
        return outer(*args)

    monkeypatch.setattr(Operands, "outer", counted)
    found = EXPERTS(**values, top_k_index=INDEX).sum()
    halves = [("hidden", "top_k_weights"), ("gate_up", "down", "gate_up_bias", "down_bias")]
    counts = []
    for half in halves:
        found.backward(retain_graph=True, inputs=[leaves[name] for name in half])
        counts.append(len(made))
    assert counts == [0, 2]
    torch.testing.assert_close([x.grad for x in leaves.values()], list(whole), rtol=0, atol=0)


NUMBERS = {"limit": 0.8, "alpha": 1.7, "gate_cap": 1.3, "up_cap": 0.9}
FORMS = [
    (ExpertForm(), True, False, True),
    (ExpertForm(), True, True, True),
    (ExpertForm(transposed_first=True, transposed_last=True, scaled_input=True),
     True, False, False),
    (ExpertForm(transposed_first=True, interleaved=True), True, False, True),
    (ExpertForm(transposed_last=True), True, True, False),
    (ExpertForm(scaled_input=True), False, False, True),
]  # fmt: skip
"""Form, gated, gate apart, biased."""


def test_every_gate_and_form() -> None:
    for form, gated, apart, biased in FORMS:
        check(given("silu", form, gated=gated, apart=apart, biased=biased))
    for name, gate in gates():
        text = said(name, {key: NUMBERS[key] for key in gate.settings})
        for parts in gate.parts:
            check(given(text, ExpertForm(), gated=parts == 2, apart=False, biased=False))


def test_kernel_of_grouped_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of pairs that are not here hold anything in it, and come into nothing."""
    products: list[Tensor] = []
    rows = set[int]()
    kernel: Any = torch_private.GROUPED_MM

    def counted(left: Tensor, right: Tensor, *, offs: Tensor) -> Tensor:
        products.append(offs)
        rows.add(left.shape[-1] if right.ndim == 2 else len(left))
        made: Tensor = kernel(left, right, offs=offs)
        if made.ndim == 2:
            made[int(offs[-1]) :] = float("nan")
        return made

    monkeypatch.setattr(grouped, "GROUPED_MM", counted)
    for form, gated, apart, biased in FORMS:
        values = given("silu", form, gated=gated, apart=apart, biased=biased)
        results: list[tuple[Tensor, ...]] = []
        for by_kernel, some in ((False, False), (True, False), (True, True)):
            products.clear()
            rows.clear()
            values["form"] = of_some(form) if some else str(form)
            monkeypatch.setattr(grouped, "takes_kernel", lambda *_, by=by_kernel: by)
            leaves = {
                name: x.detach().float().requires_grad_() if isinstance(x, Tensor) else x
                for name, x in values.items()
            }
            made = EXPERTS(**leaves, top_k_index=INDEX)
            tensors = [x for x in leaves.values() if isinstance(x, Tensor)]
            results.append((made, *torch.autograd.grad(made.sin().sum(), tensors)))
            assert len(products) == (6 + 3 * apart if by_kernel else 0)
            here = int(((INDEX >= 0) & (INDEX < EXPERT_COUNT)).sum())
            assert rows == ({here if some else INDEX.numel()} if by_kernel else set())
        torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(results[0], results[2], rtol=1e-4, atol=1e-4)


def test_some_experts_of_which_no_token_picked_any(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped, "takes_kernel", lambda *_: True)
    values = given("silu", ExpertForm(some=True), gated=True, apart=False, biased=True)
    leaves = [x for x in values.values() if isinstance(x, Tensor)]
    made = EXPERTS(**values, top_k_index=torch.full_like(INDEX, -1))
    for one in (made, *torch.autograd.grad(made.sum(), leaves)):
        assert not one.any()


def _counted(index: Tensor, held: int) -> Routing:
    """What a rank that has the first of as many experts as tokens pick counts of its own."""
    each = index.flatten().bincount().tolist()
    ranks, mean = len(each) // held, index.numel() / len(each)
    worked = {ranks: sum(each[:held]) / held / mean, len(each): max(each[:held]) / mean, 1: 1.0}
    return replace(
        spread_evenly(len(each), index.shape[1]), source="counted", ranks=tuple(sorted(worked)),
        reached=(1.0,) * len(worked), arrived=(1.0,) * len(worked),
        worked=tuple(worked[n] for n in sorted(worked)),
    )  # fmt: skip


@pytest.mark.parametrize("inner", [64, 256])
@pytest.mark.parametrize(
    ("act", "gated", "biased", "dtype", "form"),
    [
        ("silu", True, False, torch.float64, ""),
        ("silu", True, False, torch.float64, "some"),
        ("silu", True, False, torch.bfloat16, ""),
        ("silu", True, False, torch.bfloat16, "rowwise narrow_tokens"),
        ("silu", True, False, torch.bfloat16, "tensorwise some"),
        ("silu float32", True, False, torch.bfloat16, ""),
        ("quick-gelu", False, False, torch.float64, ""),
        ("steep-silu alpha=1.7 limit=7.0", True, True, torch.float32, ""),
        ("softcapped-silu gate_cap=3.0 up_cap=3.0", True, False, torch.float64, ""),
    ],
)
def test_bytes_inside_of_a_backward(
    act: str, gated: bool, biased: bool, dtype: torch.dtype, form: str, inner: int
) -> None:
    """What is said to be there at once is what is, beside operands and gradients of weights."""
    narrow = "wise" in form
    tokens, width, count = 256 if narrow else 4096, 128, 4
    some = "some" in form
    index = torch.rand(tokens, 8).topk(2).indices if some else torch.rand(tokens, 4).topk(2).indices
    columns = (1 + gated) * inner
    several = {
        "hidden": torch.rand(tokens, width), "top_k_index": index,
        "top_k_weights": torch.rand(tokens, 2), "gate_up": torch.rand(count, columns, width),
        "down": torch.rand(count, width, inner), "act": act,
    }  # fmt: skip
    if biased:
        several["gate_up_bias"] = torch.rand(count, columns)
        several["down_bias"] = torch.rand(count, width)
    cast = {
        k: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x
        for k, x in several.items()
    }
    all_given = Operands(**cast, form=form)
    made, product = experts_forward(*all_given)
    tracker = TensorTracker()
    tracker.label("parameters", [x for x in (*all_given, made, product) if isinstance(x, Tensor)])
    with watching(tracker.see, MADE_OF):
        grads = torch.ops.meshwright.experts_backward(made, product, *all_given)
    peak = tracker.peak()
    tracker.stop()
    args = tuple((k, Ref(k) if isinstance(x, Tensor) else x) for k, x in cast.items())
    names = tuple(k for k, x in args if isinstance(x, Ref))
    op = Op("experts", "experts", str(EXPERTS), (*args, ("form", form)), names, ("made",), "")
    op = replace(op, routing=_counted(index, count))
    shapes = [tuple(x.shape) for x in cast.values() if isinstance(x, Tensor)]
    count_inside = facts(str(EXPERTS)).backward_inside
    assert count_inside
    early, late = count_inside(op, shapes, product.nbytes, product.itemsize, "cpu", some)
    told = max(early + grads[0].nbytes, late + sum(x.nbytes for x in grads))
    assert peak.peak_bytes - peak.parameters_bytes == pytest.approx(told, rel=0.01)


def test_rows_are_summed_in_float32() -> None:
    groups = grouped.groups_of(torch.zeros(1, 4, dtype=torch.int64), 1, torch.bfloat16, ())
    rows = torch.tensor([[256.0] * 8, *[[1.0] * 8] * 3], dtype=torch.bfloat16)
    assert groups.summed(rows, rows[:1])[0].tolist() == [260] * 8  # 259, which bfloat16 has not
    assert groups.sums_of(rows)[0].tolist() == [259] * 8


def test_what_is_no_layer_of_experts_is_refused() -> None:
    whole = given("silu", ExpertForm(), gated=True, apart=False, biased=True)
    wrong = {
        "transposed_first": {"form": "transposed_fist"},
        "limit=NUMBER": {"act": "clamped-silu"},
        "nearest is 'silu'": {"act": "sillu"},
        "it has none": {"act": "silu limit=2"},
        "needs a gate": {"act": "steep-silu alpha=1 limit=1", "gate_up": whole["down"].mT,
                         "gate_up_bias": None},
        "inner": {"gate_up": whole["down"]},
        "do not go with": {"down": whole["down"][0]},
        r"do not go with tokens of 4; ": {"gate_up": whole["gate_up"][:, :3],
                                          "up": whole["gate_up"][:, 3:]},
        r"hidden \[6, 4\]": {"hidden": whole["hidden"][1:]},
        r"hidden \[8, 4\]": {"hidden": torch.cat([whole["hidden"], whole["hidden"][:1]])},
        "whole numbers": {"top_k_index": INDEX > 0},
        "a bias": {"down_bias": whole["gate_up_bias"]},
    }  # fmt: skip
    for said_of_it, change in wrong.items():
        with pytest.raises(PlanError, match=said_of_it):
            EXPERTS(**({"top_k_index": INDEX} | whole | change))

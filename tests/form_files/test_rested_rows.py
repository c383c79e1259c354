"""Owners step the rows that have a gradient alone, where that is the same as to step all."""

from functools import partial
from typing import Any

import pytest
import torch

from meshwright.forms.updates import UPDATES, update
from meshwright.ir.plan.plan import Plan
from meshwright.runtime.checkpoint.export import full_state
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.testing.spawn import alone, run_ranks
from tests.form_files.owners import plan_of
from tests.form_files.words import STEPS, VOCAB, WIDTH, assert_equal, batch, graph, model, plainly

MADE: dict[str, Any] = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "sgd with decay": partial(torch.optim.SGD, weight_decay=0.1),
    "sgd with momentum": partial(torch.optim.SGD, momentum=0.9),
    "adagrad with decay": partial(torch.optim.Adagrad, weight_decay=0.1),
    "adagrad that falls": partial(torch.optim.Adagrad, lr_decay=0.1, initial_accumulator_value=0.2),
    "adamw": torch.optim.AdamW,
}
ALONE = {"sgd", "adagrad", "adagrad that falls"}
"""Those under which a row without a gradient stays as it is."""


def trained(plans: list[tuple[Plan, str, float | None]]) -> Any:
    return [_trained(*each) for each in plans]


def _trained(plan: Plan, kind: str, clip: float | None) -> Any:
    """Losses, parameters, and rows of the table of words that each step stepped."""
    job = compile_job(
        model(), plan, optimizer=partial(MADE[kind], lr=0.05), device="cpu", check=False,
        example_inputs=batch(0), graph=graph(), max_grad_norm=clip,
    )  # fmt: skip
    losses, rows, wide = [], list[int](), -(-VOCAB // 2)
    table = max(job.optimizer.param_groups[0]["params"], key=lambda p: p.numel())
    stepped = job.optimizer.param_groups[0]["params"]
    place = next(i for i, p in enumerate(stepped) if p is table)
    job.optimizer.register_step_pre_hook(lambda *_: rows.append(len(stepped[place])))
    for step in range(STEPS):
        after = batch(step + 1) if step % 2 else None
        losses.append(float(job.step(batch(step), next_batch=after)))
        assert len(table) in (wide, VOCAB - wide, VOCAB)
    state = full_state(job)
    job.close()
    return (losses, state), rows


def _plain(kind: str, clip: float | None) -> Any:
    return plainly(MADE[kind], 0.05, clip)


@pytest.mark.sampled
@pytest.mark.parametrize("form", ["owned_rows", "owned_columns"])
def test_rows_with_a_gradient_alone_give_the_same(form: str) -> None:
    """Also under a limit of the norm; all rows where decay or momentum moves the others."""
    cases = [(kind, 0.3 if number % 2 else None) for number, kind in enumerate(MADE)]
    plans = [(plan_of(2, "sgd", form=form), *case) for case in cases]
    found = run_ranks(2, trained, plans)[0]
    for (kind, clip), (own, rows) in zip(cases, found, strict=True):
        assert_equal(own, alone(_plain, kind, clip))
        every = VOCAB if form == "owned_columns" else -(-VOCAB // 2)
        if kind in ALONE:
            assert max(rows) < every and rows[2] <= 2, kind
            if form == "owned_columns":
                assert rows == [len(batch(step)[0].unique()) for step in range(STEPS)]
        else:
            assert set(rows) == {every}, kind


def test_copies_of_owners_step_rows_that_any_of_them_has() -> None:
    """Each has gradients of other rows; where all rows change, all are stepped."""
    plan = plan_of(4, "sgd", dp_replicate=2, dp_shard=2)
    cases = [(plan, kind, 0.3) for kind in ("adagrad", "adamw")]
    every, wide = run_ranks(4, trained, cases), -(-VOCAB // 2)
    for number, (_, kind, clip) in enumerate(cases):
        assert_equal(every[0][number][0], alone(_plain, kind, clip))
    read = [batch(step)[0].unique() for step in range(STEPS)]
    for rank, first in enumerate((0, wide, 0, wide)):
        own = [int(((rows >= first) & (rows < first + wide)).sum()) for rows in read]
        assert every[rank][0][1] == own
        assert set(every[rank][1][1]) == {wide if not first else VOCAB - wide}


def test_what_rests_is_what_stays() -> None:
    """Of all optimizers: by what a step with a gradient of zero does."""
    for name in (name for name in UPDATES if update(name).takes((WIDTH,))):
        x = torch.nn.Parameter(torch.linspace(-1, 1, WIDTH, dtype=torch.float64))
        made = update(name).make([x], 0.1, fused=False)
        for _ in range(2):
            x.grad = torch.ones_like(x)
            made.step()
        states = [s for s in made.state[x].values() if s is not None and s.ndim]
        before = [s.detach().clone() for s in (x, *states)]
        x.grad = torch.zeros_like(x)
        made.step()
        same = all(a.equal(b) for a, b in zip(before, (x, *states), strict=True))
        assert update(name).rests_by_default == same, name

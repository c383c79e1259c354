"""Counts which rows of a model's embedding tables batches name."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from meshwright.ir.errors import PlanError
from meshwright.ir.profile.row_counts import RowCounts

_PARTS = 64
"""Of a table, of which it is told apart which rows occur: owners are seldom more."""


def count_rows(model: nn.Module, batches: Iterable[Any]) -> RowCounts:
    """Runs a model forward over batches, as it is trained with them, and counts the rows that its
    `nn.Embedding` and `nn.EmbeddingBag` look up; padding is left out, as nothing is learnt of it.

    A batch is a tensor, a tuple of arguments or a dict of them. Parameters and buffers stay as they
    are. PlanError if nothing was looked up.
    """
    seen: dict[str, Counter[int]] = {}
    rows: dict[str, int] = {}
    hooks = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            path = f"{name}.weight" if name else "weight"
            rows[path] = module.num_embeddings

            def look(
                module: nn.Module, given: tuple[Any, ...], named: dict[str, Any], path: str = path
            ) -> None:
                ids: Tensor = given[0] if given else named["input"]
                values, counts = torch.unique(ids.detach(), return_counts=True)
                found = seen.setdefault(path, Counter())
                found.update(dict(zip(values.tolist(), counts.tolist(), strict=True)))
                found.pop(module.padding_idx, None)  # type: ignore[call-overload]

            hooks.append(module.register_forward_pre_hook(look, with_kwargs=True))
    buffers = {name: x.detach().clone() for name, x in model.named_buffers()}
    try:
        with torch.no_grad():
            for batch in batches:
                if isinstance(batch, dict):
                    model(**batch)
                else:
                    model(*(batch if isinstance(batch, tuple | list) else (batch,)))
    finally:
        for hook in hooks:
            hook.remove()
        for name, x in model.named_buffers():
            x.detach().copy_(buffers[name])
    tables = {path: dict(Counter(counts.values())) for path, counts in seen.items() if counts}
    if not tables:
        raise PlanError(
            "no embedding of the model looked anything up: are there batches, and tables?"
        )
    return RowCounts(
        tables, parts={path: _parts(seen[path], rows[path]) for path in tables},
        each={path: _each(seen[path], rows[path]) for path in tables},
    )  # fmt: skip


def _each(counts: Mapping[int, int], rows: int) -> npt.NDArray[np.float64]:
    found = np.zeros(rows)
    found[list(counts)] = list(counts.values())
    return found


def _parts(counts: Mapping[int, int], rows: int) -> tuple[Mapping[int, int], ...]:
    """Of equal parts of a table, how many rows occurred how often."""
    number = min(_PARTS, rows)
    found: list[Counter[int]] = [Counter() for _ in range(number)]
    for row, times in counts.items():
        found[row * number // rows][times] += 1
    return tuple(map(dict, found))

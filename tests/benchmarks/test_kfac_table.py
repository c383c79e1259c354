"""SPD-KFAC's published steps are predicted from its component times; nobody shares inverses out
better on its models' sizes."""

from itertools import product

import numpy as np
import pytest

from benchmarks.kfac_table import (
    CALIBRATES,
    RANKS,
    ROWS,
    by_code,
    by_rule,
    dims,
    fitted,
    in_turn,
    layers,
    longest_first,
    predicted,
    takes,
    tasks,
)
from meshwright.forms.placing import ALL, MatrixTask, placed


def test_models_are_the_published_ones() -> None:
    """Layers, and millions of values of triangles of what is read and of gradients."""
    wanted = {"ResNet-50": (54, 62.3, 14.6), "ResNet-152": (156, 162.0, 32.9),
              "DenseNet-201": (201, 131.0, 1.8), "Inception-v4": (150, 116.4, 4.7)}  # fmt: skip
    for model, (count, *sizes) in wanted.items():
        made = layers(model)
        found = [
            sum([n * (n + 1) / 2 for n in part]) / 1e6 for part in list(zip(*made, strict=True))[:2]
        ]
        assert len(made) == count and found == pytest.approx(sizes, abs=0.06)


def test_given_columns_fit_two_lines() -> None:
    """One line of inverses and one of sums stand for four models each."""
    (inverse, per), (start, byte) = fitted()
    for model, row in ROWS.items():
        n = dims(model)
        assert sum([inverse + per * x * x for x in n]) == pytest.approx(row.alone, rel=0.02)
        sent = sum([start + byte * 2 * x * (x + 1) for x in n])
        assert sent == pytest.approx(row.parts[3] - row.parts[2], rel=0.01)


@pytest.mark.parametrize("model", ROWS)
def test_steps_are_predicted(model: str) -> None:
    """All within a tenth."""
    row, told = ROWS[model], predicted(model)
    assert told.mpd == pytest.approx(row.mpd, rel=0.1)
    assert told.piped == pytest.approx(row.piped, rel=0.1)
    assert told.ruled == pytest.approx(row.ruled, rel=0.1)
    assert told.spd == pytest.approx(row.spd, rel=0.1)
    if model == CALIBRATES:
        assert told.factors_early == pytest.approx(row.factors_early, rel=1e-6)
    assert told.with_ours <= told.spd


@pytest.mark.parametrize("model", ROWS)
@pytest.mark.parametrize("ranks", [4, 16, RANKS])
def test_none_of_their_rules_shares_out_better(model: str, ranks: int) -> None:
    found = tasks(model)
    ours = placed(found, ranks, by_all=True)
    for of in (
        in_turn(found, ranks), by_rule(found, dims(model), ranks), by_code(dims(model), ranks),
        longest_first(found, ranks), [ALL] * len(found),
    ):  # fmt: skip
        assert ours.takes <= takes(found, of, ranks) * (1 + 1e-12)
    assert ours.takes == pytest.approx(takes(found, ours.of, ranks), rel=1e-12)


def _best(found: list[MatrixTask], ranks: int) -> float:
    """Of all ways to share them out, or to have all do some."""
    ways = np.array(list(product(range(ALL, ranks), repeat=len(found))), dtype=np.int8)
    common = sum(
        np.where(ways[:, i] == ALL, t.work, t.told) for i, t in enumerate(found)
    )  # fmt: skip
    loads = [sum((ways[:, i] == r) * t.work for i, t in enumerate(found)) for r in range(ranks)]
    return float((common + np.max(loads, axis=0)).min())


@pytest.mark.parametrize("model", ROWS)
def test_a_few_are_shared_out_as_well_as_can_be(model: str) -> None:
    """Nine of its matrices on three ranks, also where telling costs next to nothing."""
    some = tasks(model)[:: len(dims(model)) // 9][:9]
    for told in (1.0, 0.1, 0.01):
        found = [MatrixTask(t.work, told * t.told) for t in some]
        ours = placed(found, 3, by_all=True)
        assert ours.proven and ours.takes == pytest.approx(_best(found, 3), rel=1e-12)

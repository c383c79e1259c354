"""Numbers by place: those of Triton, the same from wherever one begins, and random."""

import json
from itertools import pairwise
from threading import Thread

import numpy as np
import pytest
import torch

from meshwright.ir.launch import jit, tl
from meshwright.ir.random.philox import (
    LEVELS,
    block_numbers,
    dropped_levels,
    kept_scale,
    least_kept,
    numbers,
    numbers_at,
)
from tests.interpreted import printed

COUNT = 1 << 20
KEYS = (0, 1, 2, (1 << 63) - 1, 0x0123456789ABCDEF)


@jit
def _draw(key, out, first, BLOCKS: tl.constexpr, EACH: tl.constexpr):
    at = tl.arange(0, BLOCKS * 16)
    if EACH:
        drawn = numbers_at(key, at.to(tl.int64) + first, BLOCKS * 16)
    else:
        block = (first // 16).to(tl.int64) + tl.arange(0, BLOCKS)
        drawn = block_numbers(key, block, BLOCKS)
    tl.store(out + at, (drawn >> 16).to(tl.int16))


def by_triton() -> list[list[int]]:
    found = []
    for key in KEYS:
        for first, each in ((0, False), (1 << 40, False), (5, True), ((1 << 40) + 3, True)):
            out = torch.empty(128, dtype=torch.int16)
            _draw[(1,)](key, out, first, BLOCKS=8, EACH=each)
            found.append(out.tolist())
    return found


def test_triton_draws_the_same():
    pytest.importorskip("triton")
    wanted = [
        numbers(key, first, 128).tolist()
        for key in KEYS
        for first in (0, 1 << 40, 5, (1 << 40) + 3)
    ]
    assert printed("tests.ir.random.test_philox") == wanted


def test_a_part_is_a_part_of_the_whole():
    whole = numbers(9, 0, 1000)
    for first, count in ((0, 1), (1, 15), (16, 16), (17, 500), (999, 1)):
        assert torch.equal(numbers(9, first, count), whole[first : first + count])


def test_threads_do_not_disturb_each_other():
    wanted, wrong = numbers(5, 3, 5000), list[int]()

    def draw(key: int) -> None:
        for _ in range(200):
            if not torch.equal(numbers(5, 3, 5000), wanted):
                wrong.append(key)
            numbers(key, key, 77)

    threads = [Thread(target=draw, args=(key,)) for key in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def _streams() -> list[np.ndarray]:
    """Neighbours in every way: keys, samples of one key, and distant places."""
    firsts = [(7, 0), (8, 0), (7, COUNT), (7, 1 << 50), ((1 << 62) + 7, 0)]
    return [numbers(key, first, COUNT).numpy().astype(np.float64) for key, first in firsts]


def test_they_are_even_and_independent():
    """Each bound is five standard errors, of about 60 that are tested."""
    level, error = LEVELS / np.sqrt(12), 5 / np.sqrt(COUNT)
    streams = _streams()
    for stream in streams:
        assert abs(stream.mean() + 0.5) < error * level
        assert abs(stream.var() / level**2 - 1) < error
        centred = (stream + 0.5) / level
        for lag in (1, 2, 3, 4, 8, 15, 16, 17, 64, 768):
            assert abs((centred[lag:] * centred[:-lag]).mean()) < error
    for one, other in pairwise(streams):
        assert abs(np.corrcoef(one, other)[0, 1]) < error


def test_values_and_bits_are_equally_frequent():
    drawn = numbers(11, 0, 1 << 22).numpy().view(np.uint16)
    counts = np.bincount(drawn, minlength=LEVELS)
    expected = len(drawn) / LEVELS
    chi2 = ((counts - expected) ** 2 / expected).sum()
    assert abs(chi2 - (LEVELS - 1)) < 5 * np.sqrt(2 * (LEVELS - 1))
    for bit in range(16):
        ones = int((drawn >> bit & 1).sum())
        assert abs(ones - len(drawn) / 2) < 5 * np.sqrt(len(drawn)) / 2


def test_spacings_of_birthdays_repeat_as_often_as_they_should():
    """512 birthdays of 24 bits: spacings repeat 2 times on average (Marsaglia)."""
    people, days, rounds = 512, 1 << 24, 400
    words = numbers(13, 0, 2 * people * rounds).numpy().view(np.uint16).astype(np.int64)
    born = (words[::2] << 16 | words[1::2]) >> 8
    spacings = np.sort(np.diff(np.sort(born.reshape(rounds, people), 1), axis=1), 1)
    repeated = (np.diff(spacings, axis=1) == 0).sum()
    expected = rounds * people**3 / (4 * days)
    assert abs(repeated - expected) < 5 * np.sqrt(expected)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.3, 1e-3, 1 - 1e-3])
def test_as_many_are_dropped_as_is_said_and_the_mean_stays(p):
    kept = (numbers(3, 0, COUNT) >= least_kept(p)).double()
    assert abs(dropped_levels(p) / LEVELS - p) <= 0.5 / LEVELS
    assert abs(float(kept.mean()) - (1 - p)) < 5 * (p * (1 - p) / COUNT) ** 0.5 + 0.5 / LEVELS
    assert (1 - dropped_levels(p) / LEVELS) * kept_scale(p) == pytest.approx(1, rel=1e-15)


def test_hardly_any_and_nearly_all():
    assert dropped_levels(1e-9) == 0 and kept_scale(1e-9) == 1
    assert dropped_levels(1 - 1e-9) == LEVELS - 1


if __name__ == "__main__":
    print(json.dumps(by_triton()))

"""A DLRM whose tables lie on the host behind a cache, over the real link to the host."""

from collections.abc import Iterator

from benchmarks.gpu.claim import Claim, fact, fixed, on_page
from benchmarks.gpu.step import Fact, Place, Step

ROUNDS = 4
SHARE = 0.015
"""Slots per row: that of the page."""
POLICY = "frequency"


def run(place: Place) -> Iterator[Fact]:
    """Yields steps of the model with caches, without, and in plain PyTorch, taken in turns."""
    from statistics import mean, median

    from benchmarks.cache import dlrm
    from meshwright.profiling.rows import count_rows

    if place.rehearsal:
        dlrm.ROWS, dlrm.BATCH, dlrm.TOP[:] = 1000, 64, dlrm.SMALL_TOP
    rounds, cluster = place.of(ROUNDS, 1), place.cluster()
    data = dlrm.batches((rounds + 1) * dlrm.STEPS + 1)
    counts = count_rows(dlrm.made(), list(dlrm.batches(place.of(60, 4))))
    share = 0.2 if place.rehearsal else SHARE
    settings = {"ratio": share, "policy": POLICY, "prefetch": 1}
    plan = dlrm.plan_of(data[0], settings, cluster)
    cached, step = dlrm.job_of(plan, data, counts, place.device)
    usual, usual_step = dlrm.job_of(dlrm.plan_of(data[0], None, cluster), data, None, place.device)
    found, far = dlrm.in_turns(
        {"cached": step, "dense": usual_step, "plain": dlrm.plain(data, place.device)}, rounds
    )
    for name, times in found.items():
        yield f"{name}/step_s", median(times)
    for other in ("dense", "plain"):
        ratios = [b / a for a, b in zip(found["cached"], found[other], strict=True)]
        yield f"{other}/speed_of_cached", median(ratios)
    yield "rows_in_slots_share", mean(dlrm.rates(cached))
    yield "losses_differ", far
    cached.close()
    usual.close()


STEP = Step(
    name="embedding_cache", does="a cache of embedding rows over the link to the host", order=100,
    limit_s=20, least_s=12, run=run,
    claims=(
        Claim(
            text="over a real link a cached model is as fast beside one without as over the shaped "
                 "one of the page",
            page="results/cache.md", measured=fact("dense/speed_of_cached"), high=fixed(9.0),
            low=on_page("results/cache.md", r"MLPerf's(?:[^|]*\|){4} ([\d.]+) \|"),
        ),
        Claim(
            text="losses of a cached model, of one without and of plain PyTorch agree",
            page="concepts.md", measured=fact("losses_differ"), low=fixed(0.0), high=fixed(1e-3),
        ),
    ),
)  # fmt: skip

"""The largest batch in one piece: kept, made again, moved to the host; the predicted one is run."""

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from benchmarks.gpu.claim import Claim, fact, fixed
from benchmarks.gpu.recipe import Recipe
from benchmarks.gpu.step import Fact, Place, Step, each_in_time

if TYPE_CHECKING:
    from benchmarks.gpu.planned import Planned

RECIPES = (
    Recipe(name="largest-kept", workload="gpt2-small", largest=True),
    Recipe(name="largest-recompute", workload="gpt2-small", largest=True,
           pins=("recompute=full", "num_microbatches=1")),
    Recipe(name="largest-offload", workload="gpt2-small", largest=True,
           pins=("saved=offload", "num_microbatches=1")),
)  # fmt: skip
MORE = 1.1
"""A batch that must not fit, over the one that is predicted to be the largest."""
_EACH_S = 8


def run(place: Place) -> Iterator[Fact]:
    """Yields per kind the batch, whether it and a larger one fit, and the memory it took."""
    yield from each_in_time(place, RECIPES, _EACH_S, partial(_one, place))


def _one(place: Place, recipe: Recipe) -> Iterator[Fact]:
    from benchmarks.gpu.measured import free
    from benchmarks.gpu.planned import planned

    found = planned(place, recipe)
    yield from found.facts(recipe.name)
    free(place.device)
    fits, peak = _fits(place, found, found.plan.global_batch_size)
    yield f"{recipe.name}/fits", fits
    yield f"{recipe.name}/reserved_bytes", peak
    free(place.device)
    more = int(MORE * found.plan.global_batch_size) + 1
    yield f"{recipe.name}/more_samples", more
    yield f"{recipe.name}/more_fits", _fits(place, found, more)[0]


def _fits(place: Place, found: "Planned", samples: int) -> tuple[bool, int]:
    """Whether two steps of the plan, for so many samples, have room; and what the device gave."""
    import torch

    from benchmarks.gpu.planned import job_of, resized
    from benchmarks.gpu.workloads import on

    own = found if samples == found.plan.global_batch_size else resized(found, place, samples)
    batch = on(own.workload.batch(place.rehearsal, samples), place.device)
    job = None
    try:
        job = job_of(own, place)
        for _ in range(2):
            float(job.step(batch))
        return True, torch.cuda.max_memory_reserved() if place.device == "cuda" else 0
    except RuntimeError as error:
        if not is_memory_gone(error):
            raise
        return False, torch.cuda.max_memory_reserved()
    finally:
        if job is not None:
            job.close()


def is_memory_gone(error: RuntimeError) -> bool:
    """Whether torch's allocator, or a library beside it, found no memory."""
    import torch

    gone = isinstance(error, torch.cuda.OutOfMemoryError)
    return gone or "out of memory" in str(error).lower()


STEP = Step(
    name="batches", does="the largest batch of GPT-2, as predicted", order=80, limit_s=35,
    least_s=12, run=run, recipes=RECIPES,
    claims=tuple(
        claim
        for name in (recipe.name for recipe in RECIPES)
        for claim in (
            Claim(text=f"{name}: the batch that is predicted to fit does", page="concepts.md",
                  low=fixed(1), high=fixed(1), measured=fact(f"{name}/fits")),
            Claim(text=f"{name}: one that is a tenth larger does not", page="concepts.md",
                  low=fixed(0), high=fixed(0), measured=fact(f"{name}/more_fits")),
        )
    ),
)  # fmt: skip

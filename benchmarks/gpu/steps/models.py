"""Five models: a step and its memory as predicted, by a job, and by plain PyTorch."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from benchmarks.gpu.claim import Claim, Number, banded, fact, on_page
from benchmarks.gpu.recipe import Recipe
from benchmarks.gpu.step import ERROR, Fact, Facts, Place, Step, guarded

if TYPE_CHECKING:
    from meshwright.ir.profile.profile import Profile

RECIPES = tuple(
    Recipe(name=name, workload=name)
    for name in ("gpt2-medium", "llama-1b", "bert-large", "resnet-50", "vit-l")
)
_EACH_S = 12
"""That a model needs at least."""


def run(place: Place) -> Iterator[Fact]:
    """Yields per model: predictions, times and memory, the job's first."""
    from benchmarks.gpu.planned import profile_of

    profile = profile_of(place)
    yield "profile", profile.fingerprint if profile else "none: no step has measured one"
    for recipe in RECIPES:
        if place.left_s < place.of(_EACH_S, 1):
            yield f"{recipe.name}/{ERROR}", f"left out: {place.left_s:.0f} s were left"
            continue
        yield from guarded(recipe.name, one_model(place, recipe, profile))


def one_model(place: Place, recipe: Recipe, profile: "Profile | None") -> Iterator[Fact]:
    """Yields the facts of one model."""
    from benchmarks.gpu.eager import Autocast, Copies
    from benchmarks.gpu.measured import free, time_steps
    from benchmarks.gpu.planned import batch_of, job_of, planned, predict_again

    name = recipe.name
    found = planned(place, recipe)
    yield from found.facts(name)
    if profile is not None:
        again = predict_again(found, place.cluster(), profile)
        yield f"{name}/profiled_s", again.step_s
        yield f"{name}/profiled_band", again.error_band
    batch = batch_of(found, place)
    free(place.device)
    job = job_of(found, place)
    yield from time_steps(job.step, batch, place).facts(name)
    job.close()
    del job
    for kind in (Copies, Autocast):
        free(place.device)
        eager = kind(found.workload.model(place.rehearsal, place.device), found.workload.loss_fn,
                     place.device)  # fmt: skip
        prefix = f"{kind.__name__.lower()}_"
        yield from time_steps(eager.step, batch, place).facts(name, prefix)
        del eager


def _within(name: str, sign: int) -> Number:
    """An end of the range of bytes, by the bar that the page of results names for memory."""
    bar = on_page("results/README.md", r"\(asked \d+, \d+, [\d.]+, (\d+), \d+\)", 0.01)

    def read(facts: Facts) -> float | None:
        nbytes, share = fact(f"{name}/predicted_bytes")(facts), bar(facts)
        return None if nbytes is None or share is None else nbytes * (1 + sign * share)

    return read


CLAIMS = tuple(
    claim
    for name in (recipe.name for recipe in RECIPES)
    for claim in (
        Claim(
            text=f"{name}: a step takes what its plan says, within the band that it states",
            page="concepts.md", unit="s", measured=fact(f"{name}/chained_s"),
            low=banded(f"{name}/predicted_s", f"{name}/band", -1),
            high=banded(f"{name}/predicted_s", f"{name}/band", 1),
        ),
        Claim(
            text=f"{name}: so with a profile of this machine",
            page="concepts.md", unit="s", measured=fact(f"{name}/chained_s"),
            low=banded(f"{name}/profiled_s", f"{name}/profiled_band", -1),
            high=banded(f"{name}/profiled_s", f"{name}/profiled_band", 1),
        ),
        Claim(
            text=f"{name}: what the allocator takes is what the plan says, as near as on CPUs",
            page="results/README.md", unit="bytes", measured=fact(f"{name}/reserved_bytes"),
            low=_within(name, -1), high=_within(name, 1),
        ),
    )
)  # fmt: skip

STEP = Step(
    name="models", does="steps and memory of five models: predicted, by a job, by plain PyTorch",
    order=50, limit_s=140, least_s=20, run=run, reads=("profile",), recipes=RECIPES, claims=CLAIMS,
)  # fmt: skip

"""Parameters and optimizer on the host: steps and memory beside the prediction."""

from collections.abc import Iterator
from functools import partial

from benchmarks.gpu.claim import Claim, banded, fact
from benchmarks.gpu.recipe import PLAIN, Recipe
from benchmarks.gpu.step import Fact, Place, Step, each_in_time

RECIPES = tuple(
    Recipe(name=f"gpt2-medium-{store.replace('_', '-')}", workload="gpt2-medium",
           pins=(*PLAIN, f"store={store}"))
    for store in ("on_host", "update_on_host")
)  # fmt: skip
_EACH_S = 9


def run(place: Place) -> Iterator[Fact]:
    """Yields each store's prediction, times and memory."""
    yield from each_in_time(place, RECIPES, _EACH_S, partial(_one, place))


def _one(place: Place, recipe: Recipe) -> Iterator[Fact]:
    from benchmarks.gpu.measured import free, time_steps
    from benchmarks.gpu.planned import batch_of, job_of, planned

    found = planned(place, recipe)
    yield from found.facts(recipe.name)
    batch = batch_of(found, place)
    free(place.device)
    job = job_of(found, place)
    yield from time_steps(job.step, batch, place, 3).facts(recipe.name)
    job.close()


STEP = Step(
    name="offload", does="parameters and optimizer in the host's memory", order=90, limit_s=25,
    least_s=12, run=run, recipes=RECIPES,
    claims=tuple(
        Claim(
            text=f"{recipe.name}: a step takes what its plan says, within the band that it states",
            page="results/host_memory.md", unit="s", measured=fact(f"{recipe.name}/chained_s"),
            low=banded(fact(f"{recipe.name}/predicted_s"), f"{recipe.name}/band", -1),
            high=banded(fact(f"{recipe.name}/predicted_s"), f"{recipe.name}/band", 1),
        )
        for recipe in RECIPES
    ),
)  # fmt: skip

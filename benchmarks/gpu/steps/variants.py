"""The same model with dropout, compiled, with fused kernels; as CUDA graphs; beside plain
PyTorch with dropout."""

from collections.abc import Iterator
from functools import partial

from benchmarks.gpu.claim import Claim, banded, fact, fixed, ratio
from benchmarks.gpu.recipe import EAGER, PLAIN, Recipe
from benchmarks.gpu.step import Fact, Place, Step, each_in_time

DROPOUT, CAPTURED = 0.1, "capture=true"
RECIPES = (
    Recipe(name="gpt2-medium", workload="gpt2-medium"),
    Recipe(name="gpt2-medium-dropout", workload="gpt2-medium", dropout=DROPOUT),
    Recipe(name="gpt2-medium-auto", workload="gpt2-medium", kernels="auto"),
    Recipe(name="gpt2-medium-all", workload="gpt2-medium", kernels="all"),
    Recipe(name="llama-1b-auto", workload="llama-1b", kernels="auto"),
    Recipe(name="gpt2-medium-graphs", workload="gpt2-medium", pins=(*EAGER, CAPTURED)),
    Recipe(name="gpt2-medium-compiled", workload="gpt2-medium", pins=(*PLAIN, "compile=true")),
)
_EACH_S = 8
_BAR = 1.1
"""Of a step with dropout over eager PyTorch's: asked before the day."""


def run(place: Place) -> Iterator[Fact]:
    """Yields each variant's prediction and times."""
    yield from each_in_time(place, RECIPES, _EACH_S, partial(_one, place))


def is_compiled(recipe: Recipe) -> bool:
    """Whether its blocks are compiled by torch.compile."""
    return "compile=true" in recipe.pins


def _one(place: Place, recipe: Recipe) -> Iterator[Fact]:
    if place.rehearsal and is_compiled(recipe):
        yield f"{recipe.name}/why", "not rehearsed: it compiles for half a minute"
        return
    if place.rehearsal and CAPTURED in recipe.pins:
        yield f"{recipe.name}/why", "graphs are of GPUs; tests/gpu rehearses them on a CPU"
        return
    from benchmarks.gpu.eager import Copies
    from benchmarks.gpu.measured import free, time_steps
    from benchmarks.gpu.planned import batch_of, job_of, planned

    found = planned(place, recipe)
    yield from found.facts(recipe.name)
    yield f"{recipe.name}/kernels", len(found.plan.kernels)
    batch = batch_of(found, place)
    free(place.device)
    job = job_of(found, place)
    yield from time_steps(job.step, batch, place, 5).facts(recipe.name)
    job.close()
    del job
    if recipe.dropout:
        free(place.device)
        model = found.workload.model(place.rehearsal, place.device, recipe.dropout)
        eager = Copies(model, found.workload.loss_fn, place.device)
        yield from time_steps(eager.step, batch, place, 5).facts(recipe.name, "copies_")


STEP = Step(
    name="variants", does="dropout, fused kernels, CUDA graphs and torch.compile", order=70,
    limit_s=55, least_s=15, run=run, recipes=RECIPES,
    claims=(
        *(
            Claim(
                text=f"{recipe.name}: a step takes what its plan says, within the band it states",
                page="concepts.md", unit="s", measured=fact(f"{recipe.name}/chained_s"),
                low=banded(fact(f"{recipe.name}/predicted_s"), f"{recipe.name}/band", -1),
                high=banded(fact(f"{recipe.name}/predicted_s"), f"{recipe.name}/band", 1),
            )
            for recipe in RECIPES[1:]
            if not is_compiled(recipe)  # only a profile prices that
        ),
        Claim(
            text="fused kernels that `auto` chose make the step no longer",
            page="kernels.md", low=fixed(0), high=fixed(1.0),
            measured=ratio("gpt2-medium-auto/chained_s", "gpt2-medium/chained_s"),
        ),
        Claim(
            text="CUDA graphs make the step no longer",
            page="concepts.md", low=fixed(0), high=fixed(1.0),
            measured=ratio("gpt2-medium-graphs/chained_s", "gpt2-medium/chained_s"),
        ),
        Claim(
            text="a step with dropout over one of plain PyTorch (a bar of the day)",
            page="results/gpu.md", low=fixed(0), high=fixed(_BAR),
            measured=ratio("gpt2-medium-dropout/chained_s",
                           "gpt2-medium-dropout/copies_chained_s"),
        ),
    ),
)  # fmt: skip

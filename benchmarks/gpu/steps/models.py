"""Five models: a step and its memory as predicted, by a job, and by plain PyTorch."""

from collections.abc import Iterator
from functools import partial
from statistics import median
from typing import TYPE_CHECKING

from benchmarks.gpu.claim import Claim, Number, banded, fact, fixed, on_page, ratio
from benchmarks.gpu.recipe import Recipe
from benchmarks.gpu.step import Fact, Facts, Place, Step, each_in_time

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
    yield from each_in_time(place, RECIPES, _EACH_S, partial(one_model, place, profile))


def one_model(place: Place, profile: "Profile | None", recipe: Recipe) -> Iterator[Fact]:
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
    job.track_memory(batch)
    assert job.tensor_memory is not None
    yield f"{name}/tracked_bytes", job.tensor_memory.peak_bytes
    job.close()
    del job
    for kind in (Copies, Autocast):
        free(place.device)
        eager = kind(found.workload.model(place.rehearsal, place.device), found.workload.loss_fn,
                     place.device)  # fmt: skip
        prefix = f"{kind.__name__.lower()}_"
        yield from time_steps(eager.step, batch, place).facts(name, prefix)
        del eager


ASKED = "results/README.md"
"""Page with the bars of predictions, in percent: median and p90 of steps, correlation, resident
memory, tensors."""
_BARS = r"\(asked (\d+), \d+, [\d.]+, (\d+), (\d+)\)"
_STEPS, _RESIDENT, _TENSORS = 1, 2, 3


def _bar(which: int) -> Number:
    return on_page(ASKED, _BARS, 0.01, which)


def _within(key: str, which: int, sign: int) -> Number:
    """An end of the range around a fact, by a bar."""

    def read(facts: Facts) -> float | None:
        value, share = fact(key)(facts), _bar(which)(facts)
        return None if value is None or share is None else value * (1 + sign * share)

    return read


def _median_error(facts: Facts) -> float | None:
    """Of steps as predicted with a profile, over all models that ran."""
    ratios = (ratio(f"{r.name}/profiled_s", f"{r.name}/chained_s")(facts) for r in RECIPES)
    errors = [abs(one - 1) for one in ratios if one is not None]
    return median(errors) if errors else None


def _apart(name: str) -> Number:
    """How far the first losses of the job and of plain PyTorch are apart, as a share."""

    def read(facts: Facts) -> float | None:
        found = ratio(f"{name}/loss", f"{name}/copies_loss")(facts)
        return None if found is None else abs(found - 1)

    return read


SPACING = 2.0**-7
"""Of neighbouring values of bfloat16, relative: the losses of some models are of that type."""


def _claims(name: str) -> Iterator[Claim]:
    """Of one model."""
    for which, text in (
        ("predicted", f"{name}: a step takes what its plan says, within the band that it states"),
        ("profiled", f"{name}: so with a profile of this machine"),
    ):
        band = "band" if which == "predicted" else f"{which}_band"
        yield Claim(
            text=text, page="concepts.md", unit="s", measured=fact(f"{name}/chained_s"),
            low=banded(fact(f"{name}/{which}_s"), f"{name}/{band}", -1),
            high=banded(fact(f"{name}/{which}_s"), f"{name}/{band}", 1),
        )  # fmt: skip
    for text, said, found, bar in (
        (f"{name}: the allocator takes what the plan says, as near as on CPUs",
         "predicted_bytes", "reserved_bytes", _RESIDENT),
        (f"{name}: so with what its tensors hold at most",
         "predicted_tensor_bytes", "tracked_bytes", _TENSORS),
    ):  # fmt: skip
        yield Claim(
            text=text, page=ASKED, unit="bytes", measured=fact(f"{name}/{found}"),
            low=_within(f"{name}/{said}", bar, -1), high=_within(f"{name}/{said}", bar, 1),
        )  # fmt: skip
    yield Claim(
        text=f"{name}: the first loss is plain PyTorch's with the same copies, to bfloat16",
        page="concepts.md", unit="share", measured=_apart(name), low=fixed(0.0),
        high=fixed(SPACING),
    )  # fmt: skip


CLAIMS = (
    Claim(
        text="steps as predicted with a profile: the median error is as asked on CPUs",
        page=ASKED, unit="share", measured=_median_error, low=fixed(0.0), high=_bar(_STEPS),
    ),
    *(claim for recipe in RECIPES for claim in _claims(recipe.name)),
)  # fmt: skip

STEP = Step(
    name="models", does="steps and memory of five models: predicted, by a job, by plain PyTorch",
    order=50, limit_s=135, least_s=20, run=run, reads=("profile",), recipes=RECIPES, claims=CLAIMS,
)  # fmt: skip

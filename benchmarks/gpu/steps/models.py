"""Five models: a step and its memory as predicted, by a job, and by plain PyTorch."""

from collections.abc import Iterator

from benchmarks.gpu.claim import Claim, Number, fact, on_page
from benchmarks.gpu.step import Fact, Place, Step, guarded

NAMES = ("gpt2-medium", "llama-1b", "bert-large", "resnet-50", "vit-l")
_EACH_S = 12.0
"""That a model needs at least."""


def run(place: Place) -> Iterator[Fact]:
    """Yields per model: predictions, times and memory, the job's first."""
    from benchmarks.gpu.planned import profile_of
    from benchmarks.gpu.workloads import WORKLOADS

    profile = profile_of(place)
    yield "profile", profile.fingerprint if profile else "none: no step has measured one"
    for name in NAMES:
        if place.left_s < place.of(int(_EACH_S), 1):
            yield f"{name}/error", f"left out: {place.left_s:.0f} s were left"
            continue
        yield from guarded(name, one_model(place, WORKLOADS[name], profile))


def one_model(place: Place, workload, profile) -> Iterator[Fact]:  # type: ignore[no-untyped-def]
    """Yields the facts of one model."""
    from benchmarks.gpu.eager import Autocast, Copies
    from benchmarks.gpu.measured import free, time_steps
    from benchmarks.gpu.planned import job_of, planned, predict_again
    from benchmarks.gpu.workloads import on

    name = workload.name
    found = planned(place, workload)
    yield f"{name}/plan", found.origin
    yield f"{name}/predicted_s", found.predicted.step_s
    yield f"{name}/band", found.predicted.error_band
    yield f"{name}/predicted_bytes", found.predicted.stages[0].memory.used_bytes
    if profile is not None:
        again = predict_again(found.graph, place.cluster(), found.plan, profile)
        yield f"{name}/profiled_s", again.step_s
        yield f"{name}/profiled_band", again.error_band
    batch = on(workload.batch(place.rehearsal), place.device)
    free(place.device)
    job = job_of(found, workload, place)
    yield from time_steps(job.step, batch, place).facts(name)
    job.close()
    del job
    for kind in (Copies, Autocast):
        free(place.device)
        model = workload.model(place.rehearsal, place.device)
        eager = kind(model, workload.loss_fn, place.device)
        prefix = f"{kind.__name__.lower()}_"
        yield from time_steps(eager.step, batch, place).facts(name, prefix)
        del model, eager


def _banded(name: str, which: str, sign: int) -> Number:
    """An end of the range of step times that a prediction states."""

    def read(facts):  # type: ignore[no-untyped-def]
        step_s, band = fact(f"{name}/{which}_s")(facts), fact(f"{name}/{_BANDS[which]}")(facts)
        return None if step_s is None or band is None else step_s * (1 + sign * band)

    return read


def _within(name: str, sign: int) -> Number:
    """An end of the range of bytes, by the bar that the page of results names for memory."""
    bar = on_page("results/README.md", r"\(asked \d+, \d+, [\d.]+, (\d+), \d+\)", 0.01)

    def read(facts):  # type: ignore[no-untyped-def]
        nbytes, share = fact(f"{name}/predicted_bytes")(facts), bar(facts)
        return None if nbytes is None or share is None else nbytes * (1 + sign * share)

    return read


_BANDS = {"predicted": "band", "profiled": "profiled_band"}
CLAIMS = tuple(
    claim
    for name in NAMES
    for claim in (
        Claim(
            text=f"{name}: a step takes what its plan says, within the band that it states",
            page="concepts.md", unit="s", measured=fact(f"{name}/chained_s"),
            low=_banded(name, "predicted", -1), high=_banded(name, "predicted", 1),
        ),
        Claim(
            text=f"{name}: so with a profile of this machine",
            page="concepts.md", unit="s", measured=fact(f"{name}/chained_s"),
            low=_banded(name, "profiled", -1), high=_banded(name, "profiled", 1),
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
    order=50, limit_s=150, least_s=20, run=run, claims=CLAIMS,
)  # fmt: skip

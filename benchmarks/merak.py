"""Merak's schedules and stage-aware recompute in units of a forward, against its closed forms.

python -m benchmarks.merak; a forward and a recompute take 1, a backward 2, messages nothing.
"""

from collections.abc import Sequence

from meshwright.costmodel.simulate.simulate import StageTimes, simulate
from meshwright.planner.problem.schedule_tools import make_schedule

NAMES = ("one_f_one_b", "pre_recompute_1f1b", "last_no_recompute_1f1b", "full_critical_path_1f1b")
SIZES = ((4, 8), (8, 16), (8, 32))
SHARES = (1.0, 0.75, 0.5, 0.25)


def units(name: str, stages: int, microbatches: int, again: Sequence[float]) -> float:
    """Of a step in which stage s makes the share `again[s]` of its forward again."""
    costs = [StageTimes(forward_s=1.0, backward_s=2.0 + r, again_s=r) for r in again]
    return simulate(make_schedule(name, stages, microbatches, stages), costs).step_s


def main() -> None:
    print("| stages | micro-batches | " + " | ".join(NAMES) + " | gain |")
    print("|---" * (3 + len(NAMES)) + "|")
    for stages, count in SIZES:
        found = [units(name, stages, count, [1.0] * stages) for name in NAMES]
        cells = " | ".join(f"{step:g}" for step in found)
        print(f"| {stages} | {count} | {cells} | {found[0] / found[-1]:.3f}x |")
    print("\n| stages | micro-batches | share of stage 0 | units | gain |\n|---|---|---|---|---|")
    for stages, count in SIZES[1:]:
        plain = units(NAMES[0], stages, count, [1.0] * stages)
        for share in SHARES:
            again = [1.0] * stages if share == 1.0 else share(stages, share)
            step = units(NAMES[-1], stages, count, again)
            print(f"| {stages} | {count} | {share:g} | {step:.2f} | {plain / step:.3f}x |")


if __name__ == "__main__":
    main()

"""Named ways to treat what a block's backward needs: a policy each, for plans and for searchers."""

from dataclasses import dataclass

from meshwright.costmodel.keeping import Policy
from meshwright.costmodel.tables import Spot
from meshwright.planner.inside.saved_choice import SavedChoice
from meshwright.planner.pins.constraints import pinned
from meshwright.planner.problem import Problem

CHEAP = 0.1
"""`selective`: as much as can be made again in so much of the block's forward. Activations, norms
and short attention fit; large products do not."""


@dataclass(frozen=True, slots=True)
class SavedMode:
    """A name and its policy; `problem.tables.block(block, layout, spot, mode.policy)` prices it."""

    name: str
    policy: Policy


def saved_modes(problem: Problem, pattern: str) -> tuple[SavedMode, ...]:
    """Modes of the blocks of a pattern besides keeping all and recomputing all; the same on all
    devices and layouts, so that plans stay readable."""
    found = []
    keys = _choice(problem, pattern)
    if keys:
        found.append(SavedMode("selective", tuple((key, "recompute") for key in sorted(keys))))
    return (*found, SavedMode("offload", (("*", "offload"),)))


def pinned_policy(problem: Problem, pattern: str) -> Policy:
    """What `saved=` asks of the blocks of a pattern; empty if nothing."""
    name = pinned(problem.constraints, "saved")
    if name in (None, "none"):
        return ()
    key = (name, pattern)
    if key not in problem.policies:
        found = (mode.policy for mode in saved_modes(problem, pattern) if mode.name == name)
        problem.policies[key] = next(found, ())
    return problem.policies[key]


def _choice(problem: Problem, pattern: str) -> tuple[str, ...]:
    block = next(b for b in problem.graph.blocks if b.pattern == pattern)
    layout = next(x for x in problem.layouts(()) if x.pattern == pattern)
    samples = max(1, problem.batch // problem.cluster.num_devices)
    spot = Spot(samples, 1, (), problem.tables.device_names[0], (), ())
    makers = problem.tables.blocks.makers(block, layout, spot)
    limit_s = CHEAP * problem.tables.block(block, layout, spot).forward_s
    way = SavedChoice(makers).smallest(limit_s)
    return way.keys

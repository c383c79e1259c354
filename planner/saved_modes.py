"""Named ways to treat what a block's backward needs: a policy each, for plans and for searchers."""

from dataclasses import dataclass

from meshwright.costmodel.keeping import Policy
from meshwright.costmodel.tables import Spot
from meshwright.ir.changing import reads_changed
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
    block = next(b for b in problem.graph.blocks if b.pattern == pattern)
    if reads_changed(problem.graph, block):
        return ()
    found = []
    keys = _choice(problem, pattern)
    if keys:
        found.append(SavedMode("selective", tuple((key, "recompute") for key in sorted(keys))))
    return (*found, SavedMode("offload", (("*", "offload"),)))


def pinned_policy(problem: Problem, pattern: str) -> Policy:
    """What `saved=` asks of the blocks of a pattern; empty if nothing."""
    name = pinned(problem.constraints, "saved")
    return () if name in (None, "none") else policy_of(problem, pattern, str(name))


def policy_of(problem: Problem, pattern: str, name: str) -> Policy:
    """The policy of a mode by its name; empty if the pattern has no such mode."""
    key = (name, pattern)
    if key not in problem.policies:
        for mode in saved_modes(problem, pattern):
            problem.policies[mode.name, pattern] = mode.policy
        problem.policies.setdefault(key, ())
    return problem.policies[key]


def free_modes(problem: Problem) -> tuple[str, ...]:
    """Names of the modes that a searcher may choose block by block: none where one is pinned, and
    nothing is moved where host and device are one memory."""
    if pinned(problem.constraints, "saved") is not None:
        return ()
    apart = any(device.kind != "cpu" for device in problem.tables.devices.values())
    return ("offload", "selective") if apart else ("selective",)


def _choice(problem: Problem, pattern: str) -> tuple[str, ...]:
    block = next(b for b in problem.graph.blocks if b.pattern == pattern)
    layout = next(x for x in problem.layouts(()) if x.pattern == pattern)
    samples = max(1, problem.batch // problem.cluster.num_devices)
    spot = Spot(samples, 1, (), problem.tables.device_names[0], (), ())
    makers = problem.tables.blocks.makers(block, layout, spot)
    limit_s = CHEAP * problem.tables.block(block, layout, spot).forward_s
    way = SavedChoice(makers).smallest(limit_s)
    return way.keys

"""Named ways to treat what a block's backward needs: a policy each, for plans and for searchers."""

from collections.abc import Iterable
from dataclasses import dataclass

from meshwright.costmodel.block.keeping import Policy
from meshwright.costmodel.cost_cache import BlockSpot
from meshwright.forms.retention import fate_of, moves, offered, retention
from meshwright.ir.graph.graph import Block
from meshwright.ir.memo import Memo
from meshwright.ir.trace.changing import reads_changed
from meshwright.planner.inside.saved_choice import SavedChoice
from meshwright.planner.pins.constraints import pinned
from meshwright.planner.pins.decisions import Constraint
from meshwright.planner.problem.problem import Problem

NONE = "none"
_policies: Memo[tuple[str, str], Policy] = Memo()
"""By name of the mode and pattern."""


def asked(constraints: Iterable[Constraint]) -> str:
    """Return the form that is pinned; empty if nothing is asked of values."""
    name = pinned(constraints, "saved")
    return "" if name in (None, NONE) else str(name)


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
    found = (SavedMode(name, _policy(problem, block, name)) for name in offered())
    return tuple(mode for mode in found if mode.policy)


def pinned_policy(problem: Problem, pattern: str) -> Policy:
    """What `saved=` asks of the blocks of a pattern; empty if nothing."""
    name = asked(problem.constraints)
    return policy_of(problem, pattern, name) if name else ()


def policy_of(problem: Problem, pattern: str, name: str) -> Policy:
    """The policy of a mode by its name; empty if the pattern has no such mode."""
    key = (name, pattern)
    known = _policies.of(problem)
    if key not in known:
        for mode in saved_modes(problem, pattern):
            known[mode.name, pattern] = mode.policy
        known.setdefault(key, ())
    return known[key]


def free_modes(problem: Problem) -> tuple[str, ...]:
    """Names of the modes that a searcher may choose block by block: none where one is pinned, only
    exact ones, and nothing is moved where host and device are one memory."""
    if pinned(problem.constraints, "saved") is not None:
        return ()
    apart = any(device.is_apart for device in problem.tables.devices.values())
    exact = (name for name in offered() if retention(fate_of(name)).exact)
    return tuple(name for name in exact if apart or not moves(name))


def _policy(problem: Problem, block: Block, name: str) -> Policy:
    """What a form says of the ops of a block."""
    form, fate = retention(name), fate_of(name)
    if form.choose is None:
        return (("*", fate),)
    layout = next(x for x in problem.layouts(()) if x.pattern == block.pattern)
    samples = max(1, problem.batch // problem.cluster.num_devices)
    spot = BlockSpot(samples, 1, (), problem.tables.device_names[0], (), ())
    makers = problem.tables.blocks.makers(block, layout, spot)
    forward_s = problem.tables.block(block, layout, spot).forward_s
    return tuple((key, fate) for key in sorted(form.choose(SavedChoice(makers), forward_s)))

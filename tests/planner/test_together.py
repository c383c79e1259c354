"""Which strategies on several axes an op may have that brings parts together inside."""

import numpy as np

from meshwright.ir.graph.rules import Rule
from meshwright.ir.layout.layout import Strategy, parse_strategy
from meshwright.planner.inside.together import Side, brought_once

ATTENTION = Rule(
    sizes={"b": 4, "l": 8, "s": 8},
    inputs=((("b",), ("l",)), (("b",), ("s",))),
    outputs=((("b",), ("l",)),),
    split=frozenset({"b", "l", "ring"}),
    together={"ring": ("l", "s")},
)
EXPERTS = Rule(
    sizes={"t": 8, "e": 4},
    inputs=((("t",),), (("e",),)),
    outputs=((("t",),),),
    split=frozenset({"t", "e", "route"}),
    together={"route": ("t", "e")},
    loose=frozenset("t"),
)


def side(text: str) -> Side:
    strategy: Strategy = parse_strategy(text)
    return (*strategy.inputs, *strategy.outputs)


def allowed(rule: Rule, first: str, second: str) -> bool:
    picks = np.array([[0, 0]], np.int64)
    return bool(brought_once(rule, picks, [[side(first)], [side(second)]])[0])


def test_a_ring_is_alone_on_its_sequence() -> None:
    ring, inner = "S(1) S(1) -> S(1)", "S(1,outer=2) S(1,outer=2) -> S(1,outer=2)"
    assert allowed(ATTENTION, ring, "S(0) S(0) -> S(0)")
    assert allowed(ATTENTION, "R R -> R", ring)
    assert not allowed(ATTENTION, ring, inner)
    assert not allowed(ATTENTION, ring, "S(1,outer=2) R|P -> S(1,outer=2)")
    queries = "S(1) R|P -> S(1)"
    assert allowed(ATTENTION, queries, "S(1,outer=2) R|P -> S(1,outer=2)")


def test_tokens_may_be_split_elsewhere_but_experts_not() -> None:
    route = "S(0,outer=2) S(0) -> S(0,outer=2)"
    assert allowed(EXPERTS, "S(0) R|P -> S(0)", route)
    assert not allowed(EXPERTS, route, "R|P S(0,outer=2) -> P")
    assert not allowed(EXPERTS, route, "S(0) S(0,outer=2) -> S(0)")
    assert allowed(EXPERTS, "R|P S(0) -> P", "R|P S(0,outer=2) -> P")

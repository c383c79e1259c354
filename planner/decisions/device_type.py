"""Device types that stages may be on; checked against a cluster it is an `OnType`."""

from meshwright.planner.pins.decision import Decision

DECISION = Decision(words=())

"""The layout of blocks, by name."""

from meshwright.planner.pins.decision import Decision

DECISION = Decision(
    words=(), scope="blocks", read_block=lambda stage, block: stage.layouts.get(block.pattern, "")
)

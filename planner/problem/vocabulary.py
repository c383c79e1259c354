"""Stacks that pad a vocabulary: a plan is priced with the rows that the model has."""

from typing import TYPE_CHECKING

from meshwright.ir.errors import PlanError
from meshwright.ir.graph.graph import Graph
from meshwright.ir.styles import style

if TYPE_CHECKING:
    from meshwright.ir.plan.plan import Plan

_LOSSES = ("cross_entropy", "nll_loss")


def vocabularies(graph: Graph) -> list[int]:
    """Returns sizes of vocabularies: rows of tables that are looked up, of which a loss has as many
    classes. Positions and kinds of tokens are none."""
    looked_up, classes = set(), set()
    for op in graph.ops:
        name = op.target.split(".")[1]
        shapes = [graph.tensors[x].shape for x in op.inputs]
        if name == "embedding":
            looked_up.add(shapes[0][0])
        elif any(loss in name for loss in _LOSSES):
            # logits[n, c], or values[n, h] and weight[c, h] of both as one.
            classes |= set(shapes[1][:1] if name.startswith("linear") else shapes[0][1:2])
    return sorted(looked_up & classes)


def check_vocabulary(graph: Graph, stack: str) -> None:
    """PlanError where the stack has a vocabulary with more rows even without tensor parallelism:
    an odd number of rows has slow products, and is not split evenly."""
    multiple = style(stack).vocab_multiple
    for words in vocabularies(graph):
        if words % multiple:
            least = _up(words, multiple)
            raise PlanError(
                f"{style(stack).title} pads a vocabulary of {words} words to {least} "
                f"({_up(words, multiple * 8)} with tp=8), a multiple of {multiple} times tp: "
                f'give it a model of so many words, such as \'hf:...Config{{"vocab_size": '
                f"{least}}}'"
            )


def vocabulary_notes(graph: Graph, plan: "Plan") -> tuple[str, ...]:
    """Returns where the plan's stack pads further, for the ranks that share the vocabulary."""
    multiple = style(plan.style).vocab_multiple
    ranks = max(stage.mesh.get("tp", 1) for stage in plan.stages)
    found = [words for words in vocabularies(graph) if words % (multiple * ranks)]
    return tuple(
        f"{style(plan.style).title} pads {words} words to {more} for tp={ranks}, "
        f"{more / words - 1:.1%} more of embedding and head than priced here"
        for words in found if multiple > 1 and (more := _up(words, multiple * ranks))
    )  # fmt: skip


def _up(words: int, multiple: int) -> int:
    return -(-words // multiple) * multiple

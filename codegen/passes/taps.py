"""Taps: what reads a weight as a matrix tells the job what it read, and in its backward what
gradient its result has. Forms of synchronisation that keep statistics of both ask for it (`TAPS`).
"""

from torch import fx

from meshwright.codegen.sharded.sharded import tapped
from meshwright.ir.layers import window_of


def tap(module: fx.GraphModule, params: int) -> None:
    """Changes a block's code: results of linear layers and convolutions whose weight is one of its
    first `params` inputs after `comm` pass a tap, which changes nothing."""
    nodes = list(module.graph.nodes)
    given = [node for node in nodes if node.op == "placeholder"]
    comm, numbers = given[0], {node: i for i, node in enumerate(given[1 : params + 1])}
    for node in nodes:
        window = window_of(str(node.target), node.args[3:])
        if window is None or node.args[1] not in numbers:
            continue
        with module.graph.inserting_after(node):
            made = module.graph.call_function(
                tapped, (comm, node, node.args[0], numbers[node.args[1]], window)
            )
        node.replace_all_uses_with(made, delete_user_cb=lambda user, made=made: user is not made)
    module.graph.lint()
    module.recompile()

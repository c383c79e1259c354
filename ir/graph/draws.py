"""Which calls draw random numbers."""

from meshwright.ir.graph.graph import Op
from meshwright.ir.graph.noise import is_random
from meshwright.ir.graph.operators import operator


def draws(op: Op) -> bool:
    """Whether a call draws random numbers when it trains: dropout of nothing does not."""
    given = dict(op.args)
    names = ["dropout_p", "dropout", *(["p"] if "dropout" in op.target else [])]
    chances = [given[name] for name in names if name in given]
    if not chances:
        return is_random(operator(op.target))
    return any(map(bool, chances)) and given.get("train", True) is not False

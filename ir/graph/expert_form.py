"""How weights of a layer of experts are stored and multiplied, as words of one text."""

from dataclasses import dataclass, replace
from functools import lru_cache

from meshwright.ir.errors import PlanError
from meshwright.ir.extensions import nearest
from meshwright.ir.precision import Scaling


@dataclass(frozen=True, slots=True)
class ExpertForm:
    """How weights are stored, and where routing weights come in. Each field is a word of the text
    that the operator gets, such as `transposed_first interleaved`; without any, weights are
    [experts, out, in], all gates come before all that goes beside them, and outputs are scaled."""

    transposed_first: bool = False
    """`gate_up` and `up` are [E, in, out]."""
    transposed_last: bool = False
    """`down` is [E, in, out]."""
    interleaved: bool = False
    """Columns of the first product are gate 0, up 0, gate 1, up 1 and so on."""
    scaled_input: bool = False
    """Routing weights multiply what goes into an expert, not what comes out."""
    some: bool = False
    """These are some of all experts: pairs that are not here get no rows."""
    rowwise: bool = False
    """Products are of 8-bit floats, with a scale for each row and column, where kernels take their
    sizes."""
    tensorwise: bool = False
    """The same with a scale for each expert's operands."""
    narrow_tokens: bool = False
    """Tokens, and gradients of results, are rounded to 8-bit floats before all else: they travel so
    (`ir.graph.narrow_tokens`)."""

    @property
    def scaling(self) -> Scaling:
        """What has a scale of its own; empty: products are of values as they are."""
        return "row" if self.rowwise else "tensor" if self.tensorwise else ""

    def __str__(self) -> str:
        return " ".join(name for name in self.__slots__ if getattr(self, name))


def of_some(form: object) -> str:
    """The text of a form where a rank has some of all experts."""
    return f"{form or ''} some".strip()


def of_arrived(form: object) -> str:
    """The same where tokens have come to that rank: they have been rounded."""
    return str(replace(parse_form(of_some(form)), narrow_tokens=False))


def of_narrow(form: object, scaling: Scaling, tokens: bool = False) -> str:
    """The text of a form whose products are of 8-bit floats, and its `tokens` on their way."""
    return f"{form or ''} {scaling}wise {'narrow_tokens' * tokens}".strip()


@lru_cache(maxsize=64)
def parse_form(text: str) -> ExpertForm:
    """The form of a text; PlanError for a word that is none."""
    words = text.split()
    for word in words:
        if word not in ExpertForm.__slots__:
            raise PlanError(
                f"form {text!r}: {word!r} is no word of it; nearest is "
                f"{nearest(word, ExpertForm.__slots__)!r} of {', '.join(ExpertForm.__slots__)}"
            )
    if {"rowwise", "tensorwise"} <= {*words}:
        raise PlanError(f"form {text!r}: products have one kind of scale; keep one of the words")
    return ExpertForm(**dict.fromkeys(words, True))

"""How weights of a layer of experts are stored and multiplied, as words of one text, and which
experts have none."""

from dataclasses import dataclass, replace
from functools import lru_cache

from meshwright.ir.errors import PlanError
from meshwright.ir.extensions import nearest
from meshwright.ir.graph.graph import Op
from meshwright.ir.graph.rules import given
from meshwright.ir.precision import Scaling


@dataclass(frozen=True, slots=True)
class ExpertForm:
    """How weights are stored, and where routing weights come in. Each field is a word of the text
    that the operator gets, such as `transposed_first interleaved`, or `weightless=256`; without
    any, weights are [experts, out, in], all gates come before all that goes beside them, and
    outputs are scaled."""

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
    weightless: int = 0
    """How many more experts tokens pick that have no weights, as LongCat's hand tokens on: their
    numbers come after the others', they add nothing here and are on no rank."""

    @property
    def scaling(self) -> Scaling:
        """What has a scale of its own; empty: products are of values as they are."""
        return "row" if self.rowwise else "tensor" if self.tensorwise else ""

    def __str__(self) -> str:
        said = ((name, getattr(self, name)) for name in self.__slots__)
        return " ".join(
            f"{name}={value}" if name in _COUNTS else name for name, value in said if value
        )


def of_some(form: object) -> str:
    """The text of a form where a rank has some of all experts."""
    return f"{form or ''} some".strip()


def of_arrived(form: object) -> str:
    """The same where tokens have come to that rank: they have been rounded."""
    return str(replace(parse_form(of_some(form)), narrow_tokens=False))


def of_narrow(form: object, scaling: Scaling, tokens: bool = False) -> str:
    """The text of a form whose products are of 8-bit floats, and its `tokens` on their way."""
    return f"{form or ''} {scaling}wise {'narrow_tokens' * tokens}".strip()


_COUNTS = frozenset({"weightless"})
"""Words that have a number."""
_MOST = 2**20
"""Experts; more than any model has."""


def form_of(op: Op) -> ExpertForm:
    """Returns the form of a layer of experts."""
    return parse_form(str(given(op, "form", "") or ""))


@lru_cache(maxsize=64)
def parse_form(text: str) -> ExpertForm:
    """The form of a text; PlanError for a word that is none."""
    said: dict[str, int] = {}
    for word in text.split():
        name, equals, value = word.partition("=")
        if name not in ExpertForm.__slots__:
            raise PlanError(
                f"form {text!r}: {name!r} is no word of it; nearest is "
                f"{nearest(name, ExpertForm.__slots__)!r} of {', '.join(ExpertForm.__slots__)}"
            )
        if name in _COUNTS:
            said[name] = _count(text, name, value)
        elif equals:
            raise PlanError(f"form {text!r}: {name!r} has no value; write the word alone")
        else:
            said[name] = True
    if {"rowwise", "tensorwise"} <= {*said}:
        raise PlanError(f"form {text!r}: products have one kind of scale; keep one of the words")
    return ExpertForm(**said)  # type: ignore[arg-type]


def _count(text: str, name: str, value: str) -> int:
    if not (value.isascii() and value.isdecimal() and 1 <= int(value) <= _MOST):
        raise PlanError(
            f"form {text!r}: {name} is {value[:20]!r}; write a whole number from 1 to {_MOST:,}, "
            f"as in '{name}=256', or leave the word out"
        )
    return int(value)

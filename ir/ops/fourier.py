"""Fourier transforms: their backwards are transforms of complex values, of which the real parts are
kept."""

from math import prod

from meshwright.ir.graph.graph import Op
from meshwright.ir.graph.op_facts import CallPart, OpFacts, named


def _of_half(op: Op, part: CallPart) -> int:
    """The half that is there, filled up with zeros, and its transform: both complex."""
    return 3 * prod(part.shapes[0]) * part.width * part.wanted[0]


def _of_whole(op: Op, part: CallPart) -> int:
    """A real input's gradient is part of a complex one."""
    real = prod(part.shapes[0]) * part.width
    return real * part.wanted[0] * (part.made_bytes > real)


FACTS = {
    **named("fft_rfft fft_rfft2 fft_rfftn", OpFacts(temporaries=_of_half)),
    **named(
        "fft_fft fft_fft2 fft_fftn fft_ifft fft_ifft2 fft_ifftn", OpFacts(temporaries=_of_whole)
    ),
}

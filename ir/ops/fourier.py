"""Fourier transforms: their backwards are transforms of complex values, of which the real parts are
kept."""

from math import prod

from meshwright.ir.graph.graph import Op
from meshwright.ir.graph.op_facts import InBackward, OpFacts, named


def _of_half(op: Op, at: InBackward) -> int:
    """The half that is there, filled up with zeros, and its transform: both complex."""
    return 3 * prod(at.shapes[0]) * at.width * at.wanted[0]


def _of_whole(op: Op, at: InBackward) -> int:
    """A real input's gradient is part of a complex one."""
    real = prod(at.shapes[0]) * at.width
    return real * at.wanted[0] * (at.made_bytes > real)


FACTS = {
    **named("fft_rfft fft_rfft2 fft_rfftn", OpFacts(temporaries=_of_half)),
    **named(
        "fft_fft fft_fft2 fft_fftn fft_ifft fft_ifft2 fft_ifftn", OpFacts(temporaries=_of_whole)
    ),
}

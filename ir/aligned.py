"""Runs of elements that a table of addresses names: 16 bytes at a time where they lie so.

A compiler knows nothing of an address that the kernel itself reads, so it would move one element
at a time. Kernels ask here whether 16 divides all the addresses of a run, and 8 its counts, and say
so to the compiler on the way where it is so. Both ways do the same.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from meshwright.ir.launch import jit, tl


@jit
def lies_whole(places, counts):
    """Whether runs may be moved by 16 bytes, from their addresses and, joined by `|`, what else has
    to be a multiple of 8: counts, and first elements in tensors that begin at such an address."""
    return (places % 16 == 0) & (counts % 8 == 0)


@jit
def run_of(address, TYPE: tl.constexpr, WHOLE: tl.constexpr):
    """A pointer to the run that begins at an address."""
    pointer = address.to(tl.pointer_type(TYPE))
    return tl.multiple_of(pointer, 16) if WHOLE else pointer


@jit
def count_of(count, WHOLE: tl.constexpr):
    """The count, in words that say that 8 is a divisor of it."""
    return count // 8 * 8 if WHOLE else count

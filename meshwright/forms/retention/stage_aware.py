"""Later stages hold less, so they make less again (Merak, arXiv:2206.04959).

If stage 0 recomputes the share r of its layers, a later stage s of S recomputes
1 - (1-r)(S-1)/(S-s) of its own, none if that is negative, and the last stage none. A single stage
is the last one.
"""

from meshwright.forms.retention import Retention


def share(num_stages: int, first: float) -> tuple[float, ...]:
    """Returns the share of its layers that each stage recomputes."""
    last = num_stages - 1
    later = (1 - (1 - first) * last / (num_stages - s) for s in range(1, last))
    return (first, *(max(0.0, own) for own in later), 0.0) if last else (0.0,)


RETENTION = Retention(fate="full", share=share, offered=False)

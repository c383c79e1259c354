"""Four bits, evenly spaced between the least and the largest value of each block."""

from functools import partial

from meshwright.adapters.formats import WeightFormat, evenly

FORMAT = WeightFormat(bits=4, encode=partial(evenly, bits=4), zeros=True)

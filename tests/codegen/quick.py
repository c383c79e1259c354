"""Models in which parts are brought together inside, that are quick to run."""

from meshwright.planner.inside.prices import AlphaBeta

QUICK = AlphaBeta(latency_s=0.0, bandwidth=1e15, state_per_parameter_byte=1e6)
"""Prices at which everything that can be split is: links are free, what is stored is dear."""

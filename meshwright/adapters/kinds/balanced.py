"""Twice the rank at the same number of parameters: means of two neighbouring inputs are read, and
each output is there twice (Q-BLoRA, TACL 2025)."""

from meshwright.adapters.kinds import AdapterKind

KIND = AdapterKind(pooled=2, repeated=2, ranks=2)
"""in/2 -> 2r -> out/2: r (in + out) parameters, as LoRA of rank r."""

"""Means of whole blocks of a quantised weight are read, so that the adapter changes all values of a
block alike and merges into its zero point (QA-BLoRA, TACL 2025)."""

from meshwright.adapters.kinds import AdapterKind

KIND = AdapterKind(pooled=0, repeated=2, ranks=2)

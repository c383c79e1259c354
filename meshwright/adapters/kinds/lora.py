"""A product of two narrow matrices beside a weight (Hu et al. 2021, LoRA)."""

from meshwright.adapters.kinds import AdapterKind

KIND = AdapterKind()

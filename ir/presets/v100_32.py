"""NVIDIA V100 of 32 GB, SXM2."""

from dataclasses import replace

from meshwright.ir.presets.v100_16 import PRESET as SMALLER

PRESET = replace(SMALLER, memory_gb=32, accelerator="V100-32GB", reference="as v100-16")

"""Steps of the day, one file each, whose name is the step's; a new file is a new step.

A file has `STEP`, a `benchmarks.gpu.step.Step`. At its top it imports only what is light: the
runner reads all files before it knows whether torch can be loaded. MESHWRIGHT_GPU_STEPS names
folders with more.
"""

from meshwright.ir.extensions import add_folders

add_folders("MESHWRIGHT_GPU_STEPS", __path__)

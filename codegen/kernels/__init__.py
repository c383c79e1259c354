"""Fused kernels, one file each: Triton forward and backward, and the torch reference beside them.

A file `x.py` has `reference`, in plain torch and differentiable; `x`, an operator of torch that
traces, compiles and differentiates; and `builds`, what to compile ahead of time. The operator takes
Triton on a GPU and torch elsewhere; `launch.way` says which.
"""

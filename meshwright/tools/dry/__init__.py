"""Dry runs: every rank of a plan is built and stepped in one process, on tensors without memory."""

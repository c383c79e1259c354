"""Drives a lowered plan on torch.distributed."""

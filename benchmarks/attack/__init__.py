"""Attacks on the product with models, files, clusters and faults that it has not seen."""

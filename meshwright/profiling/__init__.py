"""`meshwright profile`: what is measured for a model on a cluster, and in which order."""

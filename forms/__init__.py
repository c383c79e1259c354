"""Answers to questions about a parameter, one file each: what it costs, as data, and how it runs.

`sync`: how replicas agree on its gradient. `updates`: how a parameter is stepped. `retention`: what
becomes of what a block saves for its backward. The file name is the key that plans and searches
use. A file imports only `ir` and torch.
"""

"""Answers to questions that a plan asks of each parameter, one file each, in a folder a question.

`sync`: how replicas agree on its gradient, and when. `storage`: where it is. `updates`: how it is
stepped. `retention`: what becomes of what a block saves for its backward. A file says what its form
costs, as data, and how it runs; its name is the key that plans and searches use. Files import `ir`
and torch alone.

Beside the folders lies what forms of synchronisation are made of: tables (`exchange`), what the
runtime calls (`running`, and `grouped` where parameters of a stage differ), flat buckets (`flat`).
"""

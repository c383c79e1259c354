"""Answers to questions about a parameter, one file each: what it costs, as data, and how it runs.

A file's name is the key that plans and searches use. A file imports only `ir` and torch.
"""

"""Measures what plans cost on this machine: ops, blocks, collectives, copies, memory."""

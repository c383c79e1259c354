"""Lowers a graph under a plan to readable modules with local shapes and explicit collectives."""

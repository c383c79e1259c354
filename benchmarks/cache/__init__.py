"""Caches of embedding tables: hits, speed."""

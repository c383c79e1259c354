"""Seconds and bytes of messages and collectives."""

"""Texts that come from outside and go to people: JSON, YAML, terminals, digests."""

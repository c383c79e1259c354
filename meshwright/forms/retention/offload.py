"""Moved to the host's memory as the next blocks run, and back a block ahead of its backward."""

from meshwright.forms.retention import Retention

RETENTION = Retention(moved=True)

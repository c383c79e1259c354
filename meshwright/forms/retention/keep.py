"""Held as autograd holds it."""

from meshwright.forms.retention import Retention

RETENTION = Retention(offered=False)

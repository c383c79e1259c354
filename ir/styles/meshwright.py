"""Our own runtime, on the libraries of the torch that it needs (2.11 and later)."""

from meshwright.ir.styles import Style

STYLE = Style(
    title="meshwright's runtime",
    libraries=2026,
    pins=(),
    reference="runtime/, and constraints.txt for the libraries",
)

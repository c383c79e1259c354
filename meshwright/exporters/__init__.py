"""Targets of `meshwright export`, one per file: `export(request)` gives an `Exported`."""

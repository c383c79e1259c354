"""Targets of `meshwright export`, one per file: `export(request)` gives an `Exported`.

MESHWRIGHT_EXPORTERS names folders with more.
"""

from meshwright.ir.extensions import add_folders

add_folders("MESHWRIGHT_EXPORTERS", __path__)

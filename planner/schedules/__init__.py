"""One file per pipeline schedule; the file name is its key. MESHWRIGHT_SCHEDULES names folders with
more."""

from meshwright.ir.extensions import add_folders

add_folders("MESHWRIGHT_SCHEDULES", __path__)

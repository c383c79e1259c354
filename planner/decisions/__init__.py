"""What can be pinned, a file each with its `DECISION`: the file's name is the pin's.

MESHWRIGHT_PINS names folders with more.
"""

from meshwright.ir.extensions import add_folders

add_folders("MESHWRIGHT_PINS", __path__)

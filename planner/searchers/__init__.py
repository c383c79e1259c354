"""One file per searcher; the file name is its key. MESHWRIGHT_SEARCHERS names folders with more."""

from meshwright.ir.extensions import add_folders

add_folders("MESHWRIGHT_SEARCHERS", __path__)

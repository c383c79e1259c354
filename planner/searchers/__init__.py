"""One file per searcher; the file name is its key. MESHWRIGHT_SEARCHERS names folders with more."""

import os
from pathlib import Path

from meshwright.ir.errors import PlanError

for _folder in filter(None, os.environ.get("MESHWRIGHT_SEARCHERS", "").split(os.pathsep)):
    if not Path(_folder).is_dir():
        raise PlanError(f"MESHWRIGHT_SEARCHERS: {_folder!r} is no folder")
    __path__.append(_folder)

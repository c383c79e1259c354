"""Predicts published training runs and reports the error.

`python -m benchmarks.published REPORT_DIR ... [--table NAME] [--part PART]
[--traces FOLDER] [-o FILE.md]`
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from benchmarks.published.parts import PARTS
from benchmarks.published.report import Case, Result, evaluate
from benchmarks.published.rows import Skip, tables
from benchmarks.published.text import markdown, terminal, told
from meshwright.ir.errors import PlanError


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", type=Path, nargs="+", help="of published tables (JSON)")
    parser.add_argument("--table", default="", help="only this table")
    parser.add_argument("--part", default="", choices=("", *PARTS), help="only rows of this part")
    parser.add_argument("--number", type=int, nargs="+", help="only rows of these numbers")
    parser.add_argument("--rows", action="store_true", help="every row as it is done")
    parser.add_argument("--traces", type=Path, help="keep graphs here, for the next run")
    parser.add_argument("-o", "--output", type=Path, help="write markdown here")
    options = parser.parse_args()
    results: list[Result] = []

    def show(end: Case | Skip) -> None:
        if options.rows:
            print(told(end), flush=True)

    try:
        for table in tables(*options.folders, only=options.table):
            kept = [row for row in table.rows if options.part in ("", row.part)]
            if options.number:
                kept = [row for row in kept if row.index in options.number]
            results.append(evaluate(replace(table, rows=tuple(kept)), show, options.traces))
            print(terminal(results[-1]), flush=True)
    except PlanError as error:
        print(error, file=sys.stderr)
        return 2
    if options.output:
        options.output.write_text(markdown(results))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

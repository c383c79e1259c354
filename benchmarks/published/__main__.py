"""Predicts published training runs and reports the error.

`python -m benchmarks.published REPORT_DIR ... [--table NAME] [-o FILE.md]`
"""

import argparse
import sys
from pathlib import Path

from benchmarks.published.report import Result, evaluate
from benchmarks.published.rows import tables
from benchmarks.published.text import markdown, terminal
from meshwright.ir.errors import PlanError


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", type=Path, nargs="+", help="of published tables (JSON)")
    parser.add_argument("--table", default="", help="only this table")
    parser.add_argument("--rows", action="store_true", help="every row, not only the worst")
    parser.add_argument("-o", "--output", type=Path, help="write markdown here")
    options = parser.parse_args()
    results: list[Result] = []
    try:
        for table in tables(*options.folders, only=options.table):
            results.append(evaluate(table))
            print(terminal(results[-1], every=options.rows), flush=True)
    except PlanError as error:
        print(error, file=sys.stderr)
        return 2
    if options.output:
        options.output.write_text(markdown(results))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

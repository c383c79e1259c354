"""What a program does that prints a page and keeps it where it is told to."""

import argparse
from collections.abc import Callable
from pathlib import Path


def print_page(about: str | None, made: Callable[..., str], *paths: str) -> None:
    """Prints what `made` returns of the files that the command line gives, called as `paths` says;
    writes it where `-o` says. `about`: the program's docstring."""
    parser = argparse.ArgumentParser(description=about)
    for path in paths:
        parser.add_argument(path, type=Path)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    text = made(*(getattr(options, path) for path in paths))
    print(text)
    if options.output:
        options.output.write_text(text)

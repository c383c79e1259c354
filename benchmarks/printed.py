"""What programs do that print a page and keep it where they are told to, or rows of models."""

import argparse
from collections.abc import Callable, Iterable
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


def print_models(
    about: str | None, row: Callable[[str, float, str, int, str], str], models: Iterable[str]
) -> None:
    """Prints a row for each model that the command line names, else for all, made by searches of as
    many seconds as it says, on the devices that it names: a preset and how many, 0 for as many as
    the model's case has, in the precision that it names or ''. `about`: the program's docstring."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("models", nargs="*", metavar="MODEL")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--devices", default="h100-sxm", help="a preset, as h100-sxm or b200:512")
    parser.add_argument("--precision", default="", help="as a plan's; else that of the case")
    options = parser.parse_args()
    preset, _, count = options.devices.partition(":")
    for name in options.models or models:
        print(row(name, options.seconds, preset, int(count or 0), options.precision), flush=True)


def beside(
    title: str, said: Callable[[tuple[str, ...]], tuple[str, float]], pins: tuple[str, ...],
    source: str,
) -> str:  # fmt: skip
    """Returns our plan and, if it has pins, the layout of others, with where that is from.

    `said`: of a plan under pins what is to be read, and its seconds a step; 0 if there is none.
    """
    ours, ours_s = said(())
    lines = [title, f"  ours: {ours}"]
    if pins:
        theirs, theirs_s = said(pins)
        ratio = f"; ours takes {ours_s / theirs_s:.2f} of that" if ours_s and theirs_s else ""
        lines.append(f"  {' '.join(pins)}: {theirs}{ratio}")
    return "\n".join([*lines, f"  ({source})"])

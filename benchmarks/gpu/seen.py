"""Which packages the steps really import, and which of them a machine lacks.

A rehearsal notes the modules that every process of it has loaded in the end: steps say so
themselves, and Pythons that they start do by `hook/sitecustomize.py`.
"""

import os
import re
import sys
import tomllib
import zipfile
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from meshwright.ir.errors import PlanError

FOLDER = "MESHWRIGHT_GPU_SEEN"
"""Environment variable: where processes write what they have loaded."""
HOOK = Path(__file__).parent / "hook"
WHEELS = "device-wheels"
"""Folder of the wheels that are carried, which git ignores."""
PYTHON = "3.12"
PLATFORMS = tuple(f"manylinux{kind}_x86_64" for kind in ("_2_28", "_2_27", "_2_17", "2014"))
"""Of the machine that has the GPU."""


def note_modules() -> None:
    """Writes the modules that this process has loaded, if somebody asked."""
    folder = os.environ.get(FOLDER)
    if folder:
        names = sorted({name.partition(".")[0] for name in sys.modules})
        (Path(folder) / f"{os.getpid()}.txt").write_text("\n".join(names), encoding="utf-8")


def watch(folder: Path) -> None:
    """Has this process's children note what they load in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    os.environ[FOLDER] = str(folder)
    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(HOOK), before)))


def gather(folder: Path) -> set[str]:
    """What all processes have noted there."""
    found: set[str] = set()
    for path in folder.glob("*.txt"):
        found |= set(path.read_text(encoding="utf-8").split())
    return found


def distributions(modules: Iterable[str]) -> set[str]:
    """Names of the installed packages that modules are of, as their lists have them."""
    known = metadata.packages_distributions()
    return {_plain(name) for module in modules for name in known.get(module, ())}


def versions(text: str) -> dict[str, str]:
    """Name -> version of lines such as `numpy==2.4.6`; of lines without one, an empty text."""
    found = {}
    for line in text.splitlines():
        name, _, version = line.partition("#")[0].strip().partition("==")
        if name:
            found[_plain(name)] = version
    return found


def other_tracers(there: Mapping[str, str], here: Mapping[str, str]) -> list[str]:
    """What decides how a model is traced, and is of another version here than on the machine: a
    plan that is prepared here may be of a model that the machine traces otherwise."""
    return [
        f"{name} {here[name]} here, {there[name]} there"
        for name in ("torch", "transformers")
        if there.get(name) and here[name].partition("+")[0] != there[name]
    ]


def wanted(pyproject: str) -> set[str]:
    """Names of the packages that a project asks for, its extras included."""
    project = tomllib.loads(pyproject)["project"]
    groups = [project["dependencies"], *project.get("optional-dependencies", {}).values()]
    return {_plain(Requirement(line).name) for group in groups for line in group}


def lacking(
    modules: Iterable[str],
    there: Mapping[str, str],
    pinned: Mapping[str, str],
    asked: Iterable[str],
) -> list[str]:
    """`name==version` of what is imported and not there; PlanError where nothing pins a version.

    `there`: packages of the machine; `pinned`: versions that this project is tested with; `asked`:
    what it imports itself. What packages that are there import is their own affair, as they may be
    of another version; of those that are carried it is carried, too, unless it is there and fits.
    """
    imported = distributions(modules)
    todo = sorted((set(asked) & imported) - set(there))
    found: dict[str, str] = {}
    while todo:
        name = todo.pop()
        if name in found:
            continue
        if name not in pinned:
            raise PlanError(f"{name} is imported and has no version in constraints.txt: add it")
        found[name] = pinned[name]
        for text in metadata.requires(name) or ():
            need = Requirement(text)
            plain = _plain(need.name)
            if plain in imported and not _fits(need, there.get(plain)):
                todo.append(plain)
    return [f"{name}=={version}" for name, version in sorted(found.items())]


def _fits(need: Requirement, version: str | None) -> bool:
    """Whether a package that is there, of a version or an unknown one, will do; an unknown one is
    taken to be new enough, but not to be old enough."""
    if version:
        return need.specifier.contains(version, prereleases=True)
    bounded = any(one.operator in ("<", "<=", "==", "~=") for one in need.specifier)
    return version is not None and not bounded


def command(wheels: Iterable[str]) -> str:
    """What brings them into the folder that is carried, as files that it holds together."""
    kinds = " ".join(f"--platform {name}" for name in PLATFORMS)
    return (
        f"pip download --no-deps --only-binary=:all: -d {WHEELS} --python-version {PYTHON} "
        f"{kinds} {' '.join(wheels)}"
    )


def unpack(folder: Path, target: Path) -> None:
    """Unpacks all wheels of a folder; what is in them can then be imported from `target`."""
    for wheel in sorted(folder.glob("*.whl")):
        with zipfile.ZipFile(wheel) as file:
            file.extractall(target)


def _plain(name: str) -> str:
    """Names are the same whatever their case and dashes."""
    return re.sub(r"[-_.]+", "-", name).lower()

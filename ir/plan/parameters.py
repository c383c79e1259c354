"""What a stage's plan says of single parameters, by patterns of their module paths."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import NamedTuple

from meshwright.ir.plan.plan import ParameterChoice, Stage


def choice_of(said: Mapping[str, ParameterChoice], path: str) -> ParameterChoice | None:
    """Returns what is said (path or pattern -> what) of one parameter; its path outranks patterns.
    None: the stage's own values are meant, or patterns say different things."""
    if path in said:
        return said[path]
    found = {str(what): what for what in _matching(said, path)}
    return next(iter(found.values())) if len(found) == 1 else None


def torn(said: Mapping[str, ParameterChoice], paths: Iterable[str]) -> str:
    """Returns the first path of which patterns say different things; empty if there is none."""
    for path in paths:
        if path not in said and len({str(what) for what in _matching(said, path)}) > 1:
            return path
    return ""


def unmatched(said: Mapping[str, ParameterChoice], paths: Iterable[str]) -> tuple[str, ...]:
    """Returns the patterns that name none of the paths."""
    known = tuple(paths)
    return tuple(p for p in said if not any(fnmatchcase(k, p) for k in known) and p not in known)


def as_for(stage: Stage, choice: ParameterChoice | None) -> Stage:
    """Returns the stage as it is for parameters of which a choice is said, as if for all."""
    if choice is None:
        return replace(stage, by_parameter={}) if stage.by_parameter else stage
    return replace(stage, zero=choice.zero, sync=choice.sync, store=choice.store, by_parameter={})


def views_of(stage: Stage) -> tuple[Stage, ...]:
    """Returns the stage as it is for parameters that no pattern names, and as it is for each of the
    patterns'."""
    return as_for(stage, None), *(as_for(stage, choice) for choice in stage.by_parameter.values())


def names_forms(stage: Stage) -> bool:
    """Tells whether replicas of a stage agree, on some parameters or all, as a form that the plan
    names says."""
    return any(view.sync is not None and view.dp > 1 for view in views_of(stage))


def stage_for(stage: Stage, path: str) -> Stage:
    """Returns the stage as it is for one parameter, as if for all."""
    return as_for(stage, choice_of(stage.by_parameter, path))


class ParameterGroup(NamedTuple):
    """Parameters of which a stage says the same."""

    stage: Stage
    """As it is for them, as if for all."""
    update: str
    """How they are stepped; empty: as the plan's `optimizer`."""
    paths: tuple[str, ...]


def groups_of(stage: Stage, paths: Iterable[str]) -> tuple[ParameterGroup, ...]:
    """Returns the paths in groups of which the stage says the same; those that no pattern names
    come first, the rest in order of what is said.

    There is at least one group, which is empty if there are no paths.
    """
    if not stage.by_parameter:
        return (ParameterGroup(stage, "", tuple(paths)),)
    found: dict[str, tuple[ParameterChoice | None, list[str]]] = {}
    for path in paths:
        choice = choice_of(stage.by_parameter, path)
        found.setdefault(str(choice or ""), (choice, []))[1].append(path)
    made = [
        ParameterGroup(as_for(stage, choice), choice.update if choice else "", tuple(own))
        for _, (choice, own) in sorted(found.items())
    ]
    return tuple(made) or (ParameterGroup(as_for(stage, None), "", ()),)


def _matching(said: Mapping[str, ParameterChoice], path: str) -> list[ParameterChoice]:
    return [what for pattern, what in said.items() if fnmatchcase(path, pattern)]

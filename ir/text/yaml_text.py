"""YAML as plain data: lists, mappings and single values; nothing that grows or makes objects.

An alias repeats what it names, so that ten lines stand for gigabytes; it is refused, as are tags,
keys that are written twice, and whatever is nested deeper than files of ours are.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import yaml
from yaml.constructor import SafeConstructor
from yaml.nodes import ScalarNode
from yaml.resolver import Resolver

from meshwright.ir.errors import PlanError
from meshwright.ir.text.canonical import MAX_DIGITS
from meshwright.ir.text.plain_text import MAX_DEPTH, check_texts, shown

MAX_BYTES = 2**19
"""Of a file. Equal nodes take one line, so that this is a cluster of thousands of kinds."""
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_TAG = "tag:yaml.org,2002:"


def parse_yaml(text: str, where: str) -> Any:
    """The data of a YAML text; PlanError, naming the line, for anything doubtful in it."""
    if len(text) > MAX_BYTES:
        raise PlanError(f"{where}: {len(text)} characters; at most {MAX_BYTES} are read")
    events = yaml.parse(text, Loader=_LOADER)
    try:
        data = _document(events, where)
    except yaml.YAMLError as error:
        raise PlanError(f"{where}: {error}") from error
    check_texts(data, where)
    return data


def _document(events: Iterator[Any], where: str) -> Any:
    found: list[Any] = []
    for event in events:
        if isinstance(event, yaml.DocumentStartEvent) and found:
            raise PlanError(f"{_at(event, where)}a second document; a file has one")
        if isinstance(event, yaml.NodeEvent):
            found.append(_value(event, events, where, 0))
    return found[0] if found else None


def _value(event: Any, events: Iterator[Any], where: str, depth: int) -> Any:
    at = _at(event, where)
    if isinstance(event, yaml.AliasEvent):
        raise PlanError(f"{at}the alias *{str(event.anchor)[:40]}: write out what it stands for")
    if event.tag not in (None, "!"):
        raise PlanError(f"{at}the tag {shown(event.tag)}: files of ours have none")
    if depth > MAX_DEPTH:
        raise PlanError(f"{at}nested more than {MAX_DEPTH} deep")
    if isinstance(event, yaml.SequenceStartEvent):
        return [_value(item, events, where, depth + 1) for item in _items(events)]
    if isinstance(event, yaml.MappingStartEvent):
        return _mapping(events, where, depth)
    return _scalar(event, at)


def _items(events: Iterator[Any]) -> Iterator[Any]:
    """What is up to the end of a list or a mapping."""
    for event in events:
        if isinstance(event, yaml.CollectionEndEvent):
            return
        yield event


def _mapping(events: Iterator[Any], where: str, depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    items = _items(events)
    for event in items:
        key = _value(event, events, where, depth + 1)
        if not isinstance(key, str):
            raise PlanError(f"{_at(event, where)}the key {shown(key)}; keys are texts")
        if key in found:
            raise PlanError(f"{_at(event, where)}{shown(key)} written twice in one mapping")
        found[key] = _value(next(items), events, where, depth + 1)
    return found


def _scalar(event: Any, at: str) -> Any:
    """What a text without quotes means in YAML 1.1; dates stay texts."""
    if not event.implicit[0]:
        return event.value
    tag = _RESOLVER.resolve(ScalarNode, event.value, (True, False))
    if tag == f"{_TAG}int" and len(event.value) > MAX_DIGITS:
        raise PlanError(f"{at}an integer of {len(event.value)} digits; at most {MAX_DIGITS}")
    construct = _CONSTRUCT.get(tag)
    try:
        return construct(ScalarNode(tag, event.value)) if construct else event.value
    except ValueError as error:
        raise PlanError(f"{at}{shown(event.value)} is no number") from error


_RESOLVER: Any = Resolver()
_SAFE = SafeConstructor()
_CONSTRUCT: Mapping[str, Callable[[ScalarNode], Any]] = {
    f"{_TAG}int": _SAFE.construct_yaml_int,
    f"{_TAG}float": _SAFE.construct_yaml_float,
    f"{_TAG}bool": _SAFE.construct_yaml_bool,
    f"{_TAG}null": lambda node: None,
}


def _at(event: Any, where: str) -> str:
    return f"{where}, line {event.start_mark.line + 1}: "

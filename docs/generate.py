"""Writes the generated pages: `python -m docs.generate`; `--check` only says which are old."""

import html
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import typer
from typer.cli import get_docs_for_click

from docs.layers import layers_page
from meshwright.cli import app
from meshwright.ir.plan.plan import SCHEMA
from meshwright.ir.plan.plan_io import json_schema

DOCS = Path(__file__).parent
CODES = """
## Exit codes

| code | meaning |
| --- | --- |
| 0 | done |
| 1 | a failure while running |
| 2 | wrong usage |
| 3 | no plan meets the constraints |
| 4 | an input breaks a rule; with `--strict`, also a doubt, or an export that is not whole |
| 5 | ranks or world do not match the plan |
| 70 | of `run --elastic`: the same failure came again, so that another try would be in vain |
| 75 | the job was asked to end and has saved: started again with `--resume` it goes on |
| 128 + n | signal n ended it |
"""


def pages() -> dict[str, str]:
    """File name -> its text."""
    return {
        "cli.md": cli_page(),
        "layers.md": layers_page(),
        "plan_schema.md": schema_page(json_schema()),
        "plan.schema.json": json.dumps(json_schema(), indent=2) + "\n",
    }


def cli_page() -> str:
    """All commands with their options, as typer describes them."""
    command = typer.main.get_command(app)
    made = get_docs_for_click(
        obj=command, ctx=typer.Context(command), name="meshwright", title="The command line"
    )
    note = "Made by `python -m docs.generate` from the commands themselves.\n"
    text = html.unescape(made.strip() + "\n").replace("**Usage**:\n\n", "", 1)
    head, _, rest = text.partition("\n\n")
    return f"{head}\n\n{note}\n{rest.strip()}\n{CODES}"


def schema_page(schema: Mapping[str, Any]) -> str:
    """The keys of a plan file, object by object, the plan itself first."""
    definitions = dict(sorted(schema["$defs"].items()))
    lines = [
        "# The plan file",
        "",
        f"Made by `python -m docs.generate` from the types of `{SCHEMA}`. For editors there is a "
        "JSON Schema: [plan.schema.json](plan.schema.json).",
        "",
        "Unknown keys are errors. `hash` is the SHA-256 of what the plan does, `seal` that of all "
        "that the file says; after editing by hand renew them with `meshwright check plan.json "
        "--rehash`. A plan by hand may be much shorter: "
        "see [concepts](concepts.md).",
        "",
        *_section("Plan", schema),
    ]
    for name, definition in definitions.items():
        lines += _section(name, definition)
    return "\n".join(lines).rstrip() + "\n"


def _section(name: str, definition: Mapping[str, Any]) -> Iterator[str]:
    yield f"## {name}"
    yield ""
    if text := definition.get("description"):
        yield from (_plain(text), "")
    if "properties" not in definition:
        yield from (_type(definition), "")
        return
    yield "| key | type | default | meaning |"
    yield "| --- | --- | --- | --- |"
    required = definition.get("required", ())
    for key, content in definition["properties"].items():
        default = "required" if key in required else _default(content)
        meaning = _plain(content.get("description", ""))
        yield f"| `{key}` | {_type(content)} | {default} | {meaning} |"
    yield ""


def _default(content: Mapping[str, Any]) -> str:
    if "default" not in content:
        return "empty"
    return f"`{json.dumps(content['default'])}`"


def _plain(text: str) -> str:
    """One line that a table cell can hold."""
    return " ".join(text.split()).replace("|", "\\|")


def _type(content: Mapping[str, Any]) -> str:
    """The type in words."""
    if "$ref" in content:
        name = content["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in content:
        return " or ".join(map(_type, content["anyOf"]))
    if "enum" in content:
        return ", ".join(f"`{json.dumps(value)}`" for value in content["enum"])
    match content.get("type"):
        case "array" if "prefixItems" in content:
            return f"list of {', '.join(map(_type, content['prefixItems']))}"
        case "array":
            return f"list of {_type(content.get('items', {}))}"
        case "object" if isinstance(content.get("additionalProperties"), dict):
            return f"object of {_type(content['additionalProperties'])}"
        case "integer":
            return "whole number"
        case str(kind):
            return kind
    return "any"


def main() -> None:
    for name, text in pages().items():
        path = DOCS / name
        old = not path.exists() or path.read_text(encoding="utf-8") != text
        if old and "--check" not in sys.argv:
            path.write_text(text, encoding="utf-8")
        if old:
            print(f"{path.name} {'is old' if '--check' in sys.argv else 'written'}")


if __name__ == "__main__":
    main()

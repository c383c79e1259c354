"""Generated pages are current, and what pages link to exists."""

import re
from pathlib import Path

import pytest

from docs.generate import DOCS, cli_page, pages, schema_page
from meshwright.cli import COMMANDS
from meshwright.ir.plan.plan_io import json_schema

TEST = re.compile(r"`(tests/[\w/.]+)`")
LINK = re.compile(r"\]\((?!https?:)([^)#]+)")


def test_generated_pages_are_current():
    old = [name for name, text in pages().items() if (DOCS / name).read_text() != text]
    assert not old, "run `python -m docs.generate`"


def test_every_command_and_key_has_its_place():
    text = cli_page()
    assert len(COMMANDS.names) > 8
    for name in COMMANDS.names:
        assert f"## `meshwright {name}`" in text
        assert all(f"`{line}`" in text for line in COMMANDS.load(name).EXAMPLES)
    schema = json_schema()
    page = schema_page(schema)
    parts = (schema, *schema["$defs"].values())
    keys = [key for part in parts for key in part.get("properties", ())]
    assert len(keys) > 80 and all(f"| `{key}` |" in page for key in keys)


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda path: path.name)
def test_links_lead_somewhere(page: Path):
    for link in LINK.findall(page.read_text()):
        assert (page.parent / link).exists(), f"{page.name} links to {link}"


def test_tests_that_pages_name_exist():
    named = {name for page in DOCS.rglob("*.md") for name in TEST.findall(page.read_text())}
    assert len(named) > 20
    assert not [name for name in sorted(named) if not (DOCS.parent / name).exists()]


def test_figures_of_published_runs_are_those_of_their_page():
    page = (DOCS / "results" / "published.md").read_text()
    dense = re.search(r"All (\d+) rows but those of mixtures: (\d+) % within 8 %, (\d+) %", page)
    mixtures = re.search(r"\| mixtures, report part.*?\| (\d+) \|.*?\| (\d+)% \| (\d+)% \|", page)
    assert dense and mixtures
    for name in ("README.md", "docs/limits.md"):
        text = " ".join((DOCS.parent / name).read_text().split())
        said = re.search(r"(\d+) published runs of dense models .*?(\d+) %.*?8 %.*?(\d+) %", text)
        assert said and said.groups() == dense.groups(), name
        said = re.search(r"of (\d+) runs of mixtures of experts (\d+) % and (\d+) %", text)
        assert said and said.groups() == mixtures.groups(), name

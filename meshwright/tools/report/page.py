"""A plan as one HTML page that loads nothing: data, style and script in one file."""

import base64
import hashlib
import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

from meshwright.ir.plan.plan import Plan
from meshwright.ir.profile.measured import Measured, load_run
from meshwright.ir.profile.profile import Profile
from meshwright.ir.profile.profile_store import load_profile
from meshwright.tools.report.contents import contents

_SCRIPTS = (
    "dom", "text", "summary", "timeline", "view", "lanes", "memory", "curve", "traffic", "model",
    "search", "measured", "beside", "perfetto", "main",
)  # fmt: skip
_STYLES = ("theme", "layout", "print")
_FOLDER = files("meshwright.tools.report") / "page"


def write_report(
    plan: Plan,
    path: str | Path,
    run: str | Path | None = None,
    *,
    beside: Plan | None = None,
    profile: str | Path | None = None,
) -> None:
    """Writes the page; `run`: the folder of a run to lay over it, `beside`: another plan,
    `profile`: a file of which it says what looks disturbed."""
    runs = load_run(run) if run else ()
    known = load_profile(profile) if profile else None
    Path(path).write_text(html(plan, runs, beside, known), encoding="utf-8")


def html(
    plan: Plan, runs: Sequence[Measured] = (), beside: Plan | None = None,
    profile: Profile | None = None,
) -> str:  # fmt: skip
    """The whole page."""
    script = _joined(_SCRIPTS, "js")
    style = _joined(_STYLES, "css")
    return _PAGE.format(
        title=escape(f"{plan.model.name} on {plan.cluster.name}"),
        policy=f"default-src 'none'; style-src {_source(style)}; script-src {_source(script)}",
        style=style,
        data=_embedded(contents(plan, runs, beside, profile)),
        script=script,
    )


def _joined(names: Sequence[str], ending: str) -> str:
    return "\n".join((_FOLDER / f"{name}.{ending}").read_text("utf-8") for name in names)


def _source(text: str) -> str:
    """The browser runs this text and no other, wherever it may come from."""
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def _embedded(data: object) -> str:
    """JSON that cannot end the element it stands in."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<noscript>This page draws itself with a script, which your browser does not run.</noscript>
<main id="page"></main>
<script type="application/json" id="plan-data">{data}</script>
<script>{script}</script>
</body>
</html>
"""

"""Plans as files: canonical JSON, its hash, and reading that refuses whatever is doubtful."""

import difflib
import json
import re
from dataclasses import fields, is_dataclass, replace
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from meshwright.ir.errors import PlanError
from meshwright.ir.plan import plan as types
from meshwright.ir.plan.bounds import bound_problems
from meshwright.ir.plan.plan import MESH_AXES, SCHEMA, Plan
from meshwright.ir.plan.runs import MOST, from_runs, has_runs, in_runs
from meshwright.ir.text.canonical import at_path, check_schema, format_json, parse_json, read_text
from meshwright.ir.text.plain_text import SHOWN, check_texts, shown

_ADAPTER = TypeAdapter(Plan)
_SORTED = frozenset(
    {"recompute", "saved", "layouts", "parameters", "ops", "versions", "settings", "by_parameter"}
)
"""Dicts whose order means nothing; sorted, so that equal plans have equal bytes."""
_CONVERTED = {"meshwright.plan/2.0": {"bf16": "bf16-autocast"}}
"""Older schema that is read -> its names of precisions that mean another one today."""
_PLAIN = frozenset({int, float, str})
_UNSAID_NULL = frozenset({"back_s", "border_back_bytes", "entry_back_bytes"})
"""Left out where null; 0 is something else."""
_UNSAID = frozenset(
    {
        "capture",
        "compile",
        "detail",
        "improved",
        "kernels",
        "method",
        "device_kind",
        "sync",
        "store",
        "style",
        "routing",
        "by_parameter",
        "update",
        "gives_up",
        "messages",
        "collectives",
        "model_flops",
        "peak_flops",
    }
)
"""What many plans do not have; left out where there is none."""
_BY_BLOCK = ("recompute", "saved")
"""Dicts of a stage by names of blocks, which files have in runs."""
_SAID = frozenset({"predicted", "evidence", "notes", "versions", "gives_up", "routing"})
"""What is known of a plan, which decides nothing: a search that a time limit ends may count other
candidates and yet find the same plan, of the same hash."""
_FIELDS = tuple(
    field.name
    for kind in vars(types).values()
    if isinstance(kind, type) and is_dataclass(kind)
    for field in fields(kind)
)


def save(plan: Plan, path: str | Path) -> None:
    """Writes the plan, with the hash of what it says."""
    Path(path).write_text(dumps(plan), encoding="utf-8")


def load(path: str | Path, *, check_hash: bool = True) -> Plan:
    """Reads a plan; PlanError names what is wrong with the file."""
    return loads(read_text(path), check_hash=check_hash, where=str(path))


def dumps(plan: Plan) -> str:
    """Canonical JSON: a git diff of two plans reads well. The hash is renewed."""
    data = _data(rehash(plan))
    check_texts(data, "the plan cannot be written")
    stages = [
        {**stage, **{key: in_runs(stage[key]) for key in _BY_BLOCK}} for stage in data["stages"]
    ]
    return format_json(data | {"stages": stages})


def loads(text: str, *, check_hash: bool = True, where: str = "plan") -> Plan:
    """The plan that `dumps` writes as `text`; keys that an older one lacked have their defaults."""
    data = parse_json(text, where)
    if isinstance(data, dict) and "schema" not in data:
        raise PlanError(
            f"{where}: has no key 'schema' ({SCHEMA!r}). A plan by hand is made whole by "
            f"`meshwright check {where} --model TARGET --cluster CLUSTER -o plan.json`"
        )
    named = data.get("schema") if isinstance(data, dict) else None
    older = isinstance(named, str) and named in _CONVERTED
    check_schema(data, data["schema"] if older else SCHEMA, where)
    if whole := _without_runs(data, where):
        data, text = whole, json.dumps(whole)
    try:
        plan = _ADAPTER.validate_json(text, strict=True)
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False)[:5]
        lines = "; ".join(_reason(problem, data) for problem in found)
        more = f"; and {error.error_count() - 5} more" * (error.error_count() > 5)
        raise PlanError(f"{where}: {lines}{more}") from error
    if beyond := [message for _, message in islice(bound_problems(plan), 5)]:
        raise PlanError(f"{where}: {'; '.join(beyond)}")
    if not check_hash:
        return _of_today(plan)
    if (wrong := edited(plan)) and (plan.seal or plan.hash != _older_hash(data)):
        raise PlanError(
            f"{where}: {wrong}: the plan was edited or damaged. If you edited it, run "
            f"`meshwright check {where} --rehash`"
        )
    return rehash(_of_today(plan))


def _without_runs(data: dict[str, Any], where: str) -> dict[str, Any]:
    """The same with each block's name in the place of runs; empty if there are none."""
    given = data.get("stages")
    stages = [dict(stage) if isinstance(stage, dict) else stage for stage in
              (given if isinstance(given, list) else ())]  # fmt: skip
    found, left = False, MOST
    for index, stage in enumerate(stages):
        for key in _BY_BLOCK if isinstance(stage, dict) else ():
            if isinstance(stage.get(key), dict) and has_runs(stage[key]):
                stage[key] = from_runs(stage[key], f"{where}: stages.{index}.{key}", left)
                found, left = True, left - len(stage[key])
    return data | {"stages": stages} if found else {}


def _of_today(plan: Plan) -> Plan:
    """A plan of an older schema with today's words for what it says."""
    words = _CONVERTED.get(plan.schema, {})
    return replace(plan, schema=SCHEMA, precision=words.get(plan.precision, plan.precision))


def edited(plan: Plan) -> str:
    """What shows that the plan is not as it was written; empty if nothing does."""
    fresh = rehash(plan)
    older = not plan.seal and plan.hash == older_hash(plan)
    if older or (plan.hash, plan.seal) == (fresh.hash, fresh.seal):
        return ""
    if plan.hash != fresh.hash:
        return f"the hash {plan.hash[:12]!r} is not that of the content, {fresh.hash[:12]!r}"
    if not plan.seal:
        return f"there is no seal, {fresh.seal[:12]!r}, of what is said about the plan"
    return (
        f"the seal {plan.seal[:12]!r} is not that of the content, {fresh.seal[:12]!r}: what is "
        "said about the plan is not what was written"
    )


def content_hash(plan: Plan) -> str:
    """SHA-256 of the canonical JSON of what the plan does."""
    return _hash_of(_data(plan))


def older_hash(plan: Plan) -> str:
    """The hash of files without a seal: of everything in them."""
    return _older_hash(_data(plan))


def _older_hash(data: Any) -> str:
    return _digest({name: item for name, item in data.items() if name != "seal"} | {"hash": ""})


def _hash_of(data: Any) -> str:
    own = {name: item for name, item in data.items() if name not in _SAID}
    return _digest(own | {"hash": "", "seal": ""})


def _digest(data: Any) -> str:
    return sha256(format_json(data).encode()).hexdigest()


def rehash(plan: Plan) -> Plan:
    """The plan with the hash of what it does and the seal of all that it says."""
    data = _data(plan)
    found = _hash_of(data)
    return replace(plan, hash=found, seal=_digest({**data, "hash": found, "seal": ""}))


def json_schema() -> dict[str, Any]:
    """JSON Schema of a plan file, for editors."""
    return {"title": SCHEMA, **_ADAPTER.json_schema()}


def _data(plan: Plan) -> Any:
    return _canonical(_ADAPTER.dump_python(plan, mode="json"), "")


def _canonical(value: Any, key: str) -> Any:
    if isinstance(value, list):
        return value if set(map(type, value)) <= _PLAIN else [_canonical(x, "") for x in value]
    if not isinstance(value, dict):
        return value
    items = list(value.items())
    if key == "mesh":
        items.sort(key=lambda item: (*MESH_AXES, item[0]).index(item[0]))
    elif key in _SORTED:
        items.sort(key=lambda item: _natural(item[0]))
    # Of saved, what each block's ops say is sorted too.
    return {
        name: _canonical(item, key if key == "saved" else name)
        for name, item in items
        if (name not in _UNSAID or item) and (name not in _UNSAID_NULL or item is not None)
    }


def _natural(text: str) -> list[tuple[int, str]]:
    """Sorts `h.2` before `h.10`."""
    return [(int(part), "") if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", text)]


def _reason(problem: Any, data: Any) -> str:
    where = ".".join(map(str, problem["loc"])) or "plan"
    if problem["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        near = difflib.get_close_matches(str(problem["loc"][-1])[:SHOWN], _FIELDS, 1)
        return f"{where}: no such key" + (f"; nearest is {near[0]!r}" if near else "")
    if problem["type"] == "json_invalid":
        return str(problem["msg"])
    if problem["type"] == "missing":
        return f"{where}: {problem['msg']}"
    return f"{where}: {problem['msg']}, given {shown(at_path(data, problem['loc']))}"

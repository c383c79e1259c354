"""A plan in the words of other tools, and files that launch it; each target is its own file."""

import shlex
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from meshwright import exporters
from meshwright.forms.methods import refuse_method
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.errors import PlanError
from meshwright.ir.extensions import Files
from meshwright.ir.plan.plan import Plan
from meshwright.ir.text.plain_text import comment
from meshwright.tools.export.export_shape import Shape, shape_of

_FILES = Files(exporters, "target")
TARGETS = _FILES.names
"""Keys of the targets: the file names of `meshwright/exporters`."""


@dataclass(frozen=True, slots=True)
class Exported:
    """The text of a file, and what of the plan it does not say."""

    text: str
    missing: tuple[str, ...] = ()


SAVE, SAVE_EVERY = "--save", "30m"
"""The option of `meshwright run` by which a job saves, and how often an exported one does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a target is given."""

    plan: Plan
    shape: Shape
    cluster: Cluster
    command: tuple[str, ...]
    """What torchrun is to run."""
    config: Any = field(default=None, repr=False)
    """The model's configuration, where it has one that names its sizes."""

    @property
    def saves(self) -> bool:
        """Whether the command saves when it is asked to end, and goes on when started again."""
        return self.command[:3] == ("-m", "meshwright", "run") and SAVE in self.command

    def setting(self, name: str) -> Any:
        """A size of the model, such as `hidden_size`; None if it is not known."""
        return getattr(self.config, name, None)


def export(
    plan: Plan,
    target: str,
    cluster: Cluster,
    *,
    command: tuple[str, ...] = ("train.py",),
    config: Any = None,
) -> Exported:
    """The file of `target`; what it cannot say is named."""
    writer = _FILES.load(target)
    refuse_method(plan)
    if plan.cluster.fingerprint != cluster.fingerprint:
        raise PlanError(
            f"the plan is for cluster {plan.cluster.name!r}, given is {cluster.name!r}: give the "
            "cluster that it was made for"
        )
    request = Request(
        plan=plan, shape=shape_of(plan), cluster=cluster, command=command, config=config
    )
    found: Exported = writer.export(request)
    return found


def title_comment(plan: Plan) -> str:
    """A comment of one line that says of which plan a file was made."""
    return comment(title(plan))


def title(plan: Plan) -> str:
    """Says of which plan a file was made; `comment` or `docstring` put it into one."""
    return (
        f"{plan.model.name} on {plan.cluster.name}, {plan.world_size} ranks, "
        f"global batch {plan.global_batch_size}; plan {plan.hash[:12]}"
    )


def shell(words: tuple[str, ...]) -> str:
    """The words as a shell reads them."""
    return " ".join(map(shlex.quote, words))


def run_command(
    plan_file: PurePath, target: str | None, script: str | None, save: PurePath | None = None
) -> tuple[str, ...]:
    """What torchrun runs: the user's script, or the plan itself if the model is known. With `save`,
    a folder, it saves there and goes on from there. PlanError where a script would have to."""
    if save is not None and (script is not None or target is None):
        raise PlanError(
            f"--save {save} needs --model TARGET, whose plan is run; a script of yours saves by "
            "mw.Saver"
        )
    if script is not None:
        return tuple(shlex.split(script))
    if target is not None:
        saved = () if save is None else (SAVE, str(save), "--save-every", SAVE_EVERY, "--resume")
        return ("-m", "meshwright", "run", plan_file.name, target, *saved)
    return ("train.py",)

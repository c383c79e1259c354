"""Option names of the targets of exports, from their own sources: `pinned/TARGET.json`.

`python -m tests.exporters.pin TARGET GIT_DIR [COMMIT]` reads them anew. Sources are
parsed, not run.
"""

import ast
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

PINNED = Path(__file__).parent / "pinned"
Reader = Callable[[str], str]


def pinned(target: str) -> dict[str, list[str]]:
    """What the target knows: kind of names -> names."""
    found: dict[str, list[str]] = json.loads((PINNED / f"{target}.json").read_text())["names"]
    return found


def fields(source: str, name: str) -> list[str]:
    """Fields of a dataclass, or of a model of pydantic with their aliases."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef) and node.name == name:
            return sorted(_fields(node))
    raise ValueError(f"there is no class {name}")


def _fields(node: ast.ClassDef) -> Iterator[str]:
    for line in node.body:
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
            yield line.target.id
            words = line.value.keywords if isinstance(line.value, ast.Call) else []
            yield from (
                str(word.value.value)
                for word in words
                if word.arg == "alias" and isinstance(word.value, ast.Constant)
            )


def literals(source: str) -> set[str]:
    """Texts that begin with two dashes and are arguments of `add_argument`."""
    return {
        each.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument"
        for each in node.args
        if isinstance(each, ast.Constant) and str(each.value).startswith("--")
    }


def excluded(source: str) -> set[str]:
    """Fields that `ArgumentGroupFactory(..., exclude=...)` leaves out, as flags."""
    lists = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.keyword) and node.arg == "exclude":
            lists.append(node.value)
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "exclude":
            lists.append(node.value)
    names = [x.value for each in lists if isinstance(each, ast.List) for x in each.elts
             if isinstance(x, ast.Constant)]  # fmt: skip
    return {f"--{dashes}{name.replace('_', '-')}" for name in names for dashes in ("", "no-")}


def _flags_of(source: str) -> Iterator[str]:
    """Flags that Megatron makes of the fields of all dataclasses of a file; of those that are true
    by default, their negations."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            for line in node.body:
                if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                    flag = line.target.id.replace("_", "-")
                    is_true = isinstance(line.value, ast.Constant) and line.value.value is True
                    yield f"--no-{flag}" if is_true else f"--{flag}"
                    yield from _named(line.value)


def _named(value: ast.expr | None) -> Iterator[str]:
    """Names in metadata of a field."""
    for node in ast.walk(value) if value is not None else ():
        if isinstance(node, ast.Constant) and str(node.value).startswith("--"):
            yield str(node.value)


_MEGATRON = (
    "core/model_parallel_config.py", "core/transformer/transformer_config.py",
    "training/config/training_config.py", "training/config/common_config.py",
)  # fmt: skip
"""Whose dataclasses become flags."""


def megatron(read: Reader) -> dict[str, list[str]]:
    arguments = read("megatron/training/arguments.py")
    made: set[str] = set()
    for path in _MEGATRON:
        made |= set(_flags_of(read(f"megatron/{path}")))
    return {"flags": sorted(literals(arguments) | made - excluded(arguments))}


def deepspeed(read: Reader) -> dict[str, list[str]]:
    constants = ast.parse(read("deepspeed/runtime/constants.py"))
    zero, numbers = (read(f"deepspeed/runtime/{x}.py") for x in ("zero/config", "precision_config"))
    top = {
        line.value.value
        for line in constants.body
        if isinstance(line, ast.Assign)
        and isinstance(line.value, ast.Constant)
        and isinstance(line.value.value, str)
        and line.value.value.isidentifier()
    }
    sections = ("zero_optimization", "tensor_parallel")
    return {
        "": sorted(top | set(sections)),
        "zero_optimization": fields(zero, "DeepSpeedZeroConfig"),
        "tensor_parallel": fields(
            read("deepspeed/runtime/tensor_parallel/config.py"), "TPTrainingConfig"
        ),
        "bf16": fields(numbers, "DeepSpeedBF16Config"),
        "fp16": fields(numbers, "DeepSpeedFP16Config"),
        "data_types": ["grad_accum_dtype"],
        "optimizer": ["params", "type"],
    }


def accelerate(read: Reader) -> dict[str, list[str]]:
    config = read("src/accelerate/commands/config/config_args.py")
    flags = {x[2:] for x in literals(read("src/accelerate/commands/launch.py"))}
    return {
        "": sorted({*fields(config, "BaseConfig"), *fields(config, "ClusterConfig")}),
        "fsdp_config": sorted(x for x in flags if x.startswith("fsdp_")),
        "parallelism_config": sorted(x for x in flags if x.startswith("parallelism_config_")),
    }


def torchtitan(read: Reader) -> dict[str, list[str]]:
    remat = read("torchtitan/distributed/activation_checkpoint.py")
    classes = {node.name for node in ast.walk(ast.parse(remat)) if isinstance(node, ast.ClassDef)}
    return {
        "torchtitan.config.parallelism": ["ParallelismConfig"],
        "torchtitan.config.parallelism.ParallelismConfig": fields(
            read("torchtitan/config/parallelism.py"), "ParallelismConfig"
        ),
        "config.training": fields(read("torchtitan/config/training.py"), "TrainingConfig"),
        "torchtitan.distributed.activation_checkpoint": sorted(classes),
        "torchtitan.trainer": ["Trainer"],
        "config": fields(read("torchtitan/trainer.py"), "Config"),
    }


TARGETS = {
    "megatron": (megatron, "https://github.com/NVIDIA/Megatron-LM"),
    "deepspeed": (deepspeed, "https://github.com/deepspeedai/DeepSpeed"),
    "accelerate": (accelerate, "https://github.com/huggingface/accelerate"),
    "torchtitan": (torchtitan, "https://github.com/pytorch/torchtitan"),
}


def main(target: str, git_dir: str, commit: str = "HEAD") -> None:
    def git(*asked: str) -> str:
        command = ["git", "-C", git_dir, *asked]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    names, source = TARGETS[target]
    found = {
        "source": source,
        "commit": git("rev-parse", commit).strip(),
        "date": git("log", "-1", "--format=%cs", commit).strip(),
        "names": names(lambda path: git("show", f"{commit}:{path}")),
    }
    PINNED.mkdir(exist_ok=True)
    (PINNED / f"{target}.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])

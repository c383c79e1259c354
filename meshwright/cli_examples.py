"""An example of each command: at the end of its help, and in docs/cli.md."""

_MODEL = "train:build_model"
_LINES = {
    "search": (
        f"meshwright search {_MODEL} -c h100-sxm:2x8 -b 256 --pin tp=2 -o plan.json",
        f"meshwright search {_MODEL} -c local:8 --profile profile.db --finalists 5 -o plan.json",
        "meshwright search 'hf:GPT2Config{\"n_layer\": 48}' -c a100-80:1x8 -c l40s:2x8 -b 128",
    ),
    "show": ("meshwright show plan.json",),
    "schema": ("meshwright schema > plan.schema.json",),
    "run": (
        f"meshwright run plan.json {_MODEL} --data train:batches --steps 100 -o runs/first",
        f"torchrun --nnodes 2 --nproc-per-node 8 ... -m meshwright run plan.json {_MODEL}",
    ),
    "check": (
        "meshwright check plan.json --rehash",
        f"meshwright check by_hand.json --model {_MODEL} -c a100-80:4x8 -o plan.json --dry-run",
    ),
    "compare": ("meshwright compare plan.json runs/first",),
    "diff": ("meshwright diff a.json b.json",),
    "explain": (f"meshwright explain plan.json --model {_MODEL}",),
    "export": (f"meshwright export plan.json --to megatron --model {_MODEL} -o flags.sh",),
    "profile": (f"meshwright profile --model {_MODEL} -c local:4 -b 64 -m 5 -o profile.db",),
    "race": (
        f"meshwright race {_MODEL} plan.json plan.2.json plan.3.json -o fastest.json",
        f"torchrun --nnodes 2 --nproc-per-node 8 ... -m meshwright race {_MODEL} plan.json ...",
    ),
    "report": ("meshwright report plan.json --run runs/first -o plan.html",),
}


def example(command: str) -> str:
    """A line each, as code."""
    return "\n\n".join(("For example:", *(f"`{line}`" for line in _LINES[command])))

"""The command line, run in this process."""

from pathlib import Path

import pytest

from meshwright.cli import app, main

ROOT = Path(__file__).parent.parent


GPT2 = (
    'hf:GPT2Config{"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 64, "n_positions": 32, '
    '"bos_token_id": 0, "eos_token_id": 0}'
)


SEARCH = ("search", GPT2, "--cluster", "local:2", "--global-batch", "4", "--precision", "fp32")


def invoke(*arguments: str) -> int:
    """The exit code of `meshwright ARGUMENTS`."""
    with pytest.raises(SystemExit) as ended:
        main(lambda: app(list(arguments)))
    code = ended.value.code
    return code if isinstance(code, int) else 0

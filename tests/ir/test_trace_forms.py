"""Forms of models and inputs beyond the zoo; each traced graph is run against the eager step."""

import os
import subprocess
import sys
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertForTokenClassification,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    SiglipVisionConfig,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

from meshwright.ir.graph.graph import Graph, Kind
from meshwright.ir.trace.loss_module import TrainingStep, flatten_batch
from meshwright.ir.trace.trace import trace
from meshwright.testing.interpret import interpret
from meshwright.testing.models import CASES
from tests.traces import zoo_graph


def check(
    model: nn.Module, batch: Any, loss_fn: Callable[..., torch.Tensor] | None = None
) -> Graph:
    """Trace, run the graph, and compare loss, gradients and buffers with the eager step."""
    graph = trace(model, batch, loss_fn)
    eager, ours = deepcopy(model), deepcopy(model)
    inputs = flatten_batch(batch)
    expected = TrainingStep(eager, loss_fn, tuple(inputs))(*inputs.values())
    expected.backward()
    loss = interpret(graph, ours, batch)[graph.loss]
    loss.backward()
    torch.testing.assert_close(loss, expected)
    for (name, p), q in zip(eager.named_parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, msg=name)
    for (name, b), c in zip(eager.named_buffers(), ours.buffers(), strict=True):
        torch.testing.assert_close(c, b, msg=name)
    return graph


class Base(nn.Module):
    """A linear layer; `forward` gives a scalar made from its result by `after`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("hidden", torch.arange(4.0), persistent=False)
        self.plain = torch.tensor([1.0, 2.0, 3.0, 4.0])

    def forward(self, x: torch.Tensor) -> Any:
        return self.after(self.linear(x))

    def after(self, x: torch.Tensor) -> Any:
        return x.pow(2).sum()


class Slices(Base):
    def after(self, x: torch.Tensor) -> Any:
        y = x.clone()
        y[:, 1:] = 2 * x[:, :-1]
        y[:, 0] = 1.5
        row = y[1]
        row += 1
        y.t()[2].mul_(3.0)
        return (y * row).sum()


class Views(Base):
    def after(self, x: torch.Tensor) -> Any:
        y = x.clone()
        flat, turned = y.view(-1), y.transpose(0, 1)
        flat[3] = 7.0
        turned[0].zero_()
        y.unsqueeze(0)[0, :, 2].fill_(0.5)
        return (flat.sum() + turned.pow(2).sum()) * y.sum()


class Masked(Base):
    def after(self, x: torch.Tensor) -> Any:
        y = F.relu(x * 2, inplace=True) + 0.5
        y.masked_fill_(x > 1, 0.25).add_(x, alpha=2)
        y[torch.arange(2), torch.tensor([0, 3])] = 5.0
        y /= y.detach().abs().max() + 1
        return y.sum()


class Copies(Base):
    def after(self, x: torch.Tensor) -> Any:
        out = torch.empty(2, 8, dtype=torch.float64)
        out[:, :4].copy_(x)
        out[:, 4:].copy_(x[0])
        return (out * torch.arange(8)).sum().float()


class Effects(Base):
    def after(self, x: torch.Tensor) -> Any:
        with torch.no_grad():
            self.seen.add_(1)
            scale = x.abs().mean() + 1
        return (x / scale * self.hidden * self.plain * torch.tensor([2.0, 1.0, 0.5, 4.0])).sum()


class Outputs(Base):
    def after(self, x: torch.Tensor) -> Any:
        return {"loss": x.sum(), "extra": None, "unused": x * 3}


class Detached(Base):
    def after(self, x: torch.Tensor) -> Any:
        return (x.detach() * x + x.sign() * (x > 0)).sum()


class Unused(Base):
    def after(self, x: torch.Tensor) -> Any:
        x.split(2, dim=1)
        first, *_ = x.chunk(2, dim=1)
        values, _ = first.max(dim=1)
        return values.sum()


@pytest.mark.parametrize(
    "model", [Slices, Views, Masked, Copies, Effects, Outputs, Detached, Unused]
)
def test_forms(model: type[nn.Module]) -> None:
    graph = check(model(), (torch.linspace(-1, 1, 8).reshape(2, 4),))
    writes = {op.target for op in graph.ops if op.target.split(".")[1].endswith("_")}
    assert writes <= {"aten.add_.Tensor"}  # that of Effects on its buffer


def test_constants_and_buffers() -> None:
    graph = trace(Effects(), (torch.ones(2, 4),))
    values = {t.value for t in graph.tensors.values() if t.kind is Kind.CONSTANT}
    assert values == {(2.0, 1.0, 0.5, 4.0), (1.0, 2.0, 3.0, 4.0)}
    assert {t.fqn for t in graph.tensors.values() if t.kind is Kind.BUFFER} == {"seen", "hidden"}


class Keywords(nn.Module):
    """Takes keywords, one of them optional, and shares a weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embed(ids)
        return self.head(x if scale is None else x * scale)  # type: ignore[no-any-return]


def _token_loss(logits: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(logits.transpose(1, 2), batch["labels"], ignore_index=0)


def test_keyword_inputs_and_tied_weights() -> None:
    ids = torch.tensor([[1, 2, 3], [4, 5, 0]])
    batch = {"ids": ids, "scale": torch.tensor(0.5), "labels": ids}
    graph = check(Keywords(), batch, _token_loss)
    assert graph.input_names == ("ids", "scale", "labels")
    assert graph.batch_inputs == ("ids", "labels")
    assert graph.tied == (("embed.weight", "head.weight"),)
    assert [t.fqn for t in graph.parameters] == ["embed.weight"]
    without = {"ids": ids, "labels": ids, "scale": None}
    assert trace(Keywords(), without, _token_loss).input_names == ("ids", "labels")


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_mean_cross_entropy(weighted: bool, smoothing: float) -> None:
    weight = torch.tensor([1.0, 2.0, 0.5, 1.5]) if weighted else None
    loss_fn = nn.CrossEntropyLoss(weight, ignore_index=-1, label_smoothing=smoothing)
    labels = torch.tensor([0, 3, -1, 2, 1])
    graph = check(nn.Linear(4, 4), (torch.randn(5, 4), labels), loss_fn)
    split = "meshwright.count_valid.default" in {op.target for op in graph.prelude_ops}
    assert split == (not weighted or not smoothing)


def test_dropout_is_traced_in_training_mode() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3), nn.Linear(4, 2)).eval()
    graph = trace(model, (torch.ones(2, 4), torch.ones(2, 2)), F.mse_loss)
    (dropout,) = (op for op in graph.ops if op.target == "aten.dropout.default")
    assert dropout.arg("p") == 0.3 and dropout.arg("train") is True


def test_frozen_part_needs_no_gradient() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    graph = check(model, (torch.ones(2, 4), torch.ones(2, 2)), F.mse_loss)
    assert not graph.tensors["relu"].requires_grad
    assert not any(op.saved for op in graph.block_ops(graph.blocks[0]))


@pytest.mark.parametrize("name", ["gpt2", "bert_mlm", "resnet50"])
def test_meta_model_is_the_same_graph(name: str) -> None:
    case = CASES[name]
    real = zoo_graph(case)
    with torch.device("meta"):
        model = case.build()
    meta = trace(model.to(torch.float64), case.example(), case.loss_fn)
    assert meta.fingerprint == real.fingerprint
    assert meta.ops == real.ops and meta.blocks == real.blocks and meta.tensors == real.tensors


def test_new_tensors_are_on_the_cpu_wherever_the_caller_makes_them() -> None:
    case = CASES["gpt2"]
    model, example = case.model(torch.float64), case.example(dtype=torch.float64)
    with torch.device("meta"):
        elsewhere = trace(model, example, case.loss_fn)
        assert torch.zeros(1).is_meta  # which is put back afterwards
    here = zoo_graph(case)
    assert elsewhere.ops == here.ops and elsewhere.tensors == here.tensors


_BERT = BertConfig(
    vocab_size=16, hidden_size=8, num_hidden_layers=2, num_attention_heads=2,
    intermediate_size=8, max_position_embeddings=12,
)  # fmt: skip
_GPT2 = GPT2Config(
    vocab_size=16, n_embd=8, n_layer=2, n_head=2, n_positions=12, bos_token_id=0, eos_token_id=0
)
_T5 = T5Config(
    vocab_size=16, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, decoder_start_token_id=0
)
_VIT = ViTConfig(
    hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8, image_size=8,
    patch_size=4,
)  # fmt: skip


@pytest.mark.parametrize(
    ("model", "config", "inputs"),
    [
        (BertForMaskedLM, _BERT, {"input_ids": (6, 12), "labels": (6, 12)}),
        (BertForSequenceClassification, _BERT, {"input_ids": (6, 12), "labels": (6,)}),
        (BertForTokenClassification, _BERT, {"input_ids": (6, 12), "labels": (6, 12)}),
        (GPT2LMHeadModel, _GPT2, {"input_ids": (6, 12), "labels": (6, 12)}),
        (T5ForConditionalGeneration, _T5, {"input_ids": (6, 512), "labels": (6, 512)}),
        (ViTForImageClassification, _VIT, {"pixel_values": (6, 3, 8, 8), "labels": (6,)}),
    ],
)
def test_own_inputs_of_hugging_face_models(
    model: Any, config: Any, inputs: dict[str, tuple[int, ...]]
) -> None:
    graph = trace(model(config), global_batch_size=6)
    found = zip(graph.input_names, graph.inputs, strict=True)
    assert {key: graph.tensors[name].shape for key, name in found} == inputs


class Tower(nn.Module):
    """Layers that are attributes, not a list."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(torch.relu(self.second(torch.relu(self.first(x))))).sum()  # type: ignore[no-any-return]


class Block(nn.Module):
    """A layer with a list of unlike parts inside."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.parts = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.parts(x)  # type: ignore[no-any-return]


def _nested() -> nn.Module:
    return nn.Sequential(
        nn.Linear(4, 8), nn.Sequential(*(Block(8) for _ in range(3))), nn.Linear(8, 4),
        nn.Sequential(Block(4), Block(4)), nn.Linear(4, 1), nn.Flatten(0),
    )  # fmt: skip


def test_blocks_of_nested_lists() -> None:
    graph = trace(_nested(), (torch.ones(2, 4), torch.ones(2)), F.mse_loss)
    assert [b.name for b in graph.blocks] == ["0", "1.0", "1.1", "1.2", "2", "3.0", "3.1", "4"]
    assert [b.pattern for b in graph.blocks] == ["0", "1.*", "1.*", "1.*", "2", "3.*", "3.*", "4"]


def test_blocks_without_a_list() -> None:
    graph = trace(Tower(), (torch.ones(2, 4),))
    assert [b.name for b in graph.blocks] == ["first", "second", "third"]


def test_one_layer_is_one_block() -> None:
    graph = trace(nn.Linear(4, 4), (torch.ones(2, 4), torch.ones(2, 4)), F.mse_loss)
    assert [b.name for b in graph.blocks] == ["main"]


TOWER = """
import torch
from torch import nn
from torch.nn import functional as F
from meshwright.ir.trace.trace import trace

widths = [16, 32, 32, 32, 32, 8]
pairs = zip(widths, widths[1:])
layers = [layer for left, right in pairs for layer in (nn.Linear(left, right), nn.ReLU())]
batch = torch.ones(8, 16, dtype=torch.float64), torch.arange(8)
graph = trace(nn.Sequential(*layers[:-1]).double(), batch, F.cross_entropy)
said = f"{graph.fingerprint} {[block.signature for block in graph.blocks]}"
"""


def test_fingerprint_is_the_same_in_every_process() -> None:
    here: dict[str, str] = {}
    exec(TOWER, here)
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    other = subprocess.run(
        [sys.executable, "-c", f"{TOWER}print(said)"], check=True, capture_output=True, text=True,
        env={"PYTHONHASHSEED": seed, "PYTHONPATH": "."},
    )  # fmt: skip
    assert here["said"].count(" ") > 1 and other.stdout == f"{here['said']}\n"


def test_sparse_gradients_become_dense_ones() -> None:
    embedding = nn.Embedding(8, 4, sparse=True)
    graph = trace(nn.Sequential(embedding), (torch.zeros(2, 3, dtype=torch.int64), torch.ones(2)),
                  lambda out, y: (out.sum((1, 2)) * y).sum())  # fmt: skip
    (op,) = [op for op in graph.ops if op.target.startswith("aten.embedding")]
    assert op.arg("sparse") is False


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_masks_of_pictures_in_gemma_3(attention: str) -> None:
    """Tokens of a picture see each other: the library makes such masks with torch.vmap."""
    text = Gemma3TextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, sliding_window=8,
        max_position_embeddings=64, query_pre_attn_scalar=8, pad_token_id=0,
    )  # fmt: skip
    vision = SiglipVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        image_size=16, patch_size=4,
    )  # fmt: skip
    config = Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_id=60,
        boi_token_index=61, eoi_token_index=62,
    )  # fmt: skip
    kind: Any = Gemma3ForConditionalGeneration
    model = kind._from_config(config, attn_implementation=attention).train()
    ids = torch.randint(3, 60, (2, 16))
    labels = ids.clone()
    ids[:, 2:6] = 60
    batch = {"input_ids": ids, "pixel_values": torch.randn(2, 3, 16, 16),
             "token_type_ids": (ids == 60).long(), "labels": labels}  # fmt: skip
    graph = trace(model, batch)
    torch.testing.assert_close(interpret(graph, model, batch)[graph.loss], model(**batch).loss)

"""BLOOM's Megatron-DeepSpeed: its stages, what waits for what, and what its optimizer needs."""

from dataclasses import replace

import pytest

from benchmarks.published.layers import layer
from benchmarks.published.memory import Memory
from benchmarks.published.predict import predict, stage_send_s, waiting
from benchmarks.published.recipes import recipe_of
from benchmarks.published.report import errors, evaluate, spearman
from benchmarks.published.rows import Context, read_row, tables
from benchmarks.published.sites import ground_of
from benchmarks.published.stages import site_of, stages_of
from benchmarks.published.sync import extra_of
from benchmarks.published.systems import system_of
from benchmarks.published.times import cost
from tests.benchmarks.published_folder import FOLDER
from tests.benchmarks.published_rows import raw

HIDDEN, VOCAB = 14336, 250680


def bloom(layers=72, tp=8, pp=12, mbs=4, heads=64, ends=False, precision="fp16"):
    made = raw(
        hardware={"gpu": "A100-SXM4-80GB", "gpus": 384},
        model={"name": "GPT", "layers": layers, "hidden": HIDDEN, "heads": heads, "vocab": VOCAB,
               "act": "gelu", "tied": True},
        parallel={"tp": tp, "pp": pp, "dp": 384 // tp // pp, "zero": 1, "ends_are_layers": ends},
        batch={"gbs": 2048, "mbs": mbs, "seq": 2048}, precision=precision,
    )  # fmt: skip
    return read_row(made, 0, Context("bloom", {}, "bigscience, Megatron-DeepSpeed"))


def parts(row):
    recipe = recipe_of(row, system_of(row))
    return stages_of(row, recipe, ground_of(row)), recipe


def test_its_bf16_optimizer_is_another():
    half, bf16 = system_of(bloom()), system_of(bloom(precision="bf16, fp32 gradients"))
    assert half.name == bf16.name == "Megatron-DeepSpeed 2022"
    assert (half.gradient_bytes, half.sync_bytes, half.tp_overlap) == (2, 2, "none")
    assert (bf16.gradient_bytes, bf16.sync_bytes) == (6, 4)


@pytest.mark.parametrize(
    ("layers", "ends", "sizes"),
    [
        (78, False, [7] * 11 + [1]),
        (72, False, [6] * 12),
        (106, True, [8, *[9] * 10, 8]),
        (70, True, [5, *[6] * 10, 5]),
    ],
)
def test_how_layers_are_dealt_to_stages(layers, ends, sizes):
    found, _ = parts(bloom(layers=layers, ends=ends))
    assert [len(part.layers) for part in found] == sizes
    assert [i for part in found for i in part.layers] == list(range(layers))
    assert [part.last for part in found] == [False] * 11 + [True]


def test_nothing_hides_what_the_cpu_takes():
    """Every kernel is waited for: both times add up."""
    row = bloom()
    (_, middle, *_), recipe = parts(row)
    plain = replace(recipe, system=replace(recipe.system, blocks_launches=False))
    (_, beside, *_) = stages_of(row, plain, ground_of(row))
    cost_s = beside.cost
    assert cost_s.forward_dispatch_s > 6 * 0.8e-3 and cost_s.forward > cost_s.forward_dispatch_s
    assert middle.cost.forward == pytest.approx(cost_s.forward_s + cost_s.forward_dispatch_s)
    assert middle.cost.backward == pytest.approx(cost_s.backward_s + cost_s.backward_dispatch_s)


def test_a_stage_stands_still_while_it_sends():
    row = bloom()
    found, recipe = parts(row)
    ground = ground_of(row)
    send_s = stage_send_s(row, recipe, ground)
    for part in found:
        extra = extra_of(row, recipe, ground, part)
        more = waiting(extra, part, send_s)
        assert more.per_forward_s - extra.per_forward_s == (0.0 if part.last else send_s)
        assert more.per_backward_s - extra.per_backward_s == (0.0 if part.first else send_s)
        assert more.after_s == extra.after_s


def test_heads_that_are_not_aligned_are_slow():
    """13824 values in 128 heads: rows of 108, at half the rate without tensor cores."""
    row = bloom(heads=128)  # 112 values
    odd = replace(row, shape=replace(row.shape, hidden=13824))
    scores = [
        next(p for p in layer(site) if p.name == "scores")
        for site in (_site(row), _site(odd))
    ]  # fmt: skip
    aligned, uneven = (cost([piece], ground_of(row)).forward_s for piece in scores)
    assert uneven == pytest.approx(scores[1].op.flops / 9.6e12, rel=0.05)
    assert uneven > 5 * aligned


def _site(row):
    return site_of(row, recipe_of(row, system_of(row)))


def test_memory_of_the_step_and_of_the_context():
    row = bloom(layers=70, ends=True)
    found, _ = parts(row)
    first = found[0]
    shard, table = 4, VOCAB * HIDDEN / 8
    memory = predict(row).memory
    plain = first.layer.peak_bytes
    assert memory.transient_bytes - plain == pytest.approx(
        6 * first.parameters / shard + 8 * min(table, first.parameters / shard) + 1e9
    )
    assert memory.context_bytes == 1.5 * 2**30
    assert memory.peak("device") == memory.peak("reserved") + memory.context_bytes
    bf16 = predict(bloom(layers=70, ends=True, precision="bf16, fp32 gradients")).memory
    assert bf16.transient_bytes - plain == pytest.approx(
        4 * min(table, first.parameters / shard) + 2e9
    )
    assert bf16.states_bytes - memory.states_bytes == pytest.approx(4 * first.parameters)


def test_kinds_of_memory():
    memory = Memory(states_bytes=6.0, activations_bytes=3.0, transient_bytes=1.0, limit_bytes=100,
                    context_bytes=5)  # fmt: skip
    assert memory.peak("allocated") == 10.0
    assert memory.peak("device") == memory.peak("reserved") + 5 > 15.0


def test_the_table_is_predicted():
    (table,) = tables(FOLDER, only="bloom_prequel")
    assert len(table.rows) == 135 and len(table.skipped) == 1
    cases = evaluate(replace(table, rows=table.rows[::4])).cases
    times, memory = errors(c.time_error for c in cases), errors(c.memory_error for c in cases)
    assert times is not None and times.median_abs < 0.11
    assert memory is not None and memory.median_abs < 0.08
    rank = spearman([(c.prediction.step_s, c.row.step_s) for c in cases if c.row.step_s])
    assert rank is not None and rank > 0.85

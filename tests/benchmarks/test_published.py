"""Published tables: parameter counts, closed forms, rows that are refused, and the report."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.published.ends import head
from benchmarks.published.layers import layer
from benchmarks.published.measured import RowError
from benchmarks.published.notes import HEAD
from benchmarks.published.predict import predict, stage_send_s
from benchmarks.published.recipes import recipe_of, recompute_mode
from benchmarks.published.report import errors, evaluate, spearman
from benchmarks.published.rows import read_table
from benchmarks.published.site import Site
from benchmarks.published.sites import ground_of
from benchmarks.published.stages import stages_of
from benchmarks.published.sync import extra_of
from benchmarks.published.systems import ALPA, DEEPSPEED, MEGATRON_2022, system_of
from benchmarks.published.times import cost, recomputed
from meshwright.costmodel.comm.comm import collective_time
from meshwright.ir.cluster.device import OpClass
from meshwright.ir.errors import PlanError
from meshwright.ir.layout.conversions import Primitive
from tests.benchmarks.published_rows import GPT3, LLAMA_8B, internevo, llama, raw, row


def test_parameter_counts_are_the_known_ones():
    assert llama().shape.parameters == 8_030_261_248
    assert row().shape.parameters == pytest.approx(174.6e9, rel=2e-3)


def test_stage_parameters_sum_to_the_model():
    one = row()
    parts = stages_of(one, recipe_of(one, system_of(one)), ground_of(one))
    assert len(parts) == 24
    held = sum(part.parameters for part in parts) * 8
    # The head's copy of the table on the last stage, and norms on every tensor-parallel rank.
    norms = 96 * 2 * one.shape.norm_parameters
    extra = one.shape.vocab * one.shape.hidden + norms * 7
    assert held == pytest.approx(one.shape.parameters + extra, rel=1e-3)


@pytest.mark.parametrize(
    ("tp", "sp", "mode", "form"),
    [
        (1, False, "none", lambda s, b, h, a, t: s * b * h * (34 + 5 * a * s / h)),
        (8, False, "none", lambda s, b, h, a, t: s * b * h * (10 + 24 / t + 5 * a * s / (h * t))),
        (8, True, "none", lambda s, b, h, a, t: s * b * h / t * (34 + 5 * a * s / h)),
        (8, False, "core", lambda s, b, h, a, t: s * b * h * (10 + 24 / t)),
        (8, True, "core", lambda s, b, h, a, t: 34 * s * b * h / t),
        (1, False, "full", lambda s, b, h, a, t: 2 * s * b * h),
    ],
)
def test_kept_activations_are_korthikantis_closed_form(tp, sp, mode, form):
    one = row(parallel={"tp": tp, "dp": 64 // tp}, batch={"gbs": 256, "mbs": 4, "seq": 2048})
    site = Site(shape=one.shape, system=MEGATRON_2022, mbs=4, seq=2048, tp=tp, sp=sp)
    entry = 2 * site.shared * one.shape.hidden
    kept = recomputed(layer(site), mode, entry, ground_of(one)).saved_bytes
    assert kept == form(2048, 4, one.shape.hidden, one.shape.heads, tp)


def test_flops_of_a_layer():
    one = row()
    site = Site(shape=one.shape, system=MEGATRON_2022, mbs=1, seq=2048)
    h = one.shape.hidden
    assert sum(p.op.flops for p in layer(site)) == 24 * 2048 * h * h + 4 * 2048 * 2048 * h


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"parallel": {"tp": 8, "pp": 8, "dp": 2}}, "is not 64 GPUs"),
        ({"parallel": {}}, "parallel layout is not given"),
        ({"parallel": {"strategy": "guess"}}, "'guess'"),
        ({"batch": {"seq": 2048}}, "micro-batch or the global batch"),
        ({"batch": {"gbs": 64, "mbs": 1}}, "batch.seq is missing"),
        ({"batch": {"gbs": "many", "mbs": 1, "seq": 8}}, "'many'"),
        ({"model": {"name": "ResNet-50"}}, "no shape"),
        ({"status": "failed"}, "another reason"),
        ({"hardware": {"gpu": "A100-SXM4-80GB"}}, "hardware.gpus"),
    ],
)
def test_rows_that_lack_something_are_refused(changes, words):
    with pytest.raises(RowError, match=words):
        row(**changes)


def test_unknown_device_stack_and_recompute_are_refused():
    hardware = {"gpu": "Abacus 9000", "gpus": 64}
    with pytest.raises(RowError, match="Abacus 9000"):
        predict(row(hardware=hardware))
    with pytest.raises(RowError, match="no stack is named"):
        predict(row("a table of runs"))
    with pytest.raises(RowError, match="'sometimes'"):
        recompute_mode("sometimes")


def test_report_counts_every_row(tmp_path: Path):
    rows = [raw(), raw(model={"name": "ResNet"}), raw(hardware={"gpu": "Abacus", "gpus": 64}),
            raw(status="oom", measured={})]  # fmt: skip
    path = tmp_path / "megatron_runs.json"
    path.write_text(json.dumps({"name": "megatron", "rows": rows}))
    result = evaluate(read_table(path))
    assert [case.row.index for case in result.cases] == [0, 3]
    assert [skip.index for skip in result.skipped] == [1, 2]
    assert result.cases[0].time_error == result.cases[0].prediction.step_s / 18.13 - 1
    assert result.cases[1].time_error is None


def test_a_file_that_is_no_table_is_refused(tmp_path: Path):
    path = tmp_path / "other.json"
    path.write_text("{}")
    with pytest.raises(PlanError, match="rows"):
        read_table(path)


def test_measured_times_come_from_what_the_row_prints():
    assert row(measured={"tokens_per_s_per_gpu": 64}).step_s == 64 * 2048 / (64 * 64)
    flops = row().shape.dense_flops(64, 2048, 96)
    assert row(measured={"tflops_per_gpu": 100}).step_s == flops / (100e12 * 64)
    assert row(suspect=True).step_s is None


def test_more_work_takes_longer_and_more_memory():
    base = predict(row())
    assert predict(row(recompute="none")).step_s < base.step_s
    assert predict(row(recompute="none")).memory.activations_bytes > base.memory.activations_bytes
    more = predict(row(batch={"gbs": 128, "mbs": 1, "seq": 2048}))
    assert 1.5 < more.step_s / base.step_s < 2.0


def test_zero_divides_states():
    whole = predict(llama(parallel={"dp": 64, "zero": 0}))
    shard = predict(llama(parallel={"dp": 64, "zero": 3, "fsdp_group": 64}))
    assert shard.memory.states_bytes * 64 == pytest.approx(whole.memory.states_bytes)


def test_layer_cost_has_collectives_only_where_a_group_is():
    one, two = row(parallel={"tp": 1, "dp": 64}), row(parallel={"tp": 8, "dp": 8})
    pieces = [layer(Site(shape=r.shape, system=MEGATRON_2022, mbs=1, seq=2048, tp=r.parallel.tp))
              for r in (one, two)]  # fmt: skip
    assert not any(p.messages for p in pieces[0])
    silent = sum(p.op.flops for p in pieces[1]) * 8
    assert silent == sum(p.op.flops for p in pieces[0])
    assert cost(pieces[1], ground_of(two)).forward_s > cost(pieces[0], ground_of(one)).forward_s / 8


def test_error_figures():
    found = errors([0.1, -0.2, None, 0.03])
    assert found and (found.count, found.worst, found.median_abs) == (3, 0.2, 0.1)
    assert found.within_8 == pytest.approx(1 / 3)
    assert spearman([(1, 10), (2, 20), (3, 30)]) == 1
    assert spearman([(1, 30), (2, 20), (3, 10)]) == -1


def test_a_compiled_loss_needs_less_memory_and_split_logits_more():
    eager, compiled = llama(), llama(compile=True)
    sizes = [system_of(r).logits_bytes for r in (compiled, eager, llama(parallel={"tp": 8}))]
    assert sizes == sorted(sizes)
    assert predict(compiled).memory.allocated_bytes < predict(eager).memory.allocated_bytes
    assert system_of(llama(compile=True, study="docs of 2024")).logits_bytes == 14


def test_pipelined_fsdp_keeps_its_stage_whole():
    whole = predict(llama(parallel={"pp": 2, "dp": 32, "zero": 3})).memory
    assert whole.transient_bytes > 6 * llama().shape.parameters / 2


def test_chunks_hide_all_but_one_and_scales_by_row_cost_more():
    parallel = {"tp": 8, "dp": 8, "zero": 3, "sp": True}
    large = {"compile": True, "batch": {"gbs": 64, "mbs": 8, "seq": 8192}}
    plain = predict(llama(parallel=parallel, **large)).step_s
    chunked = predict(llama(parallel={**parallel, "async_tp": True}, **large)).step_s
    assert chunked < plain
    tensor, rows = (
        predict(llama(parallel=parallel, precision=f"float8 {kind}")).step_s
        for kind in ("tensorwise", "rowwise")
    )
    assert tensor < rows


def test_gradients_of_weights_may_be_exact_in_float8():
    """Their products then take as long as in half precision."""
    h100 = {"gpu": "H100-SXM5-80GB", "gpus": 64, "gpus_per_node": 8}
    half, exact, rows = (
        predict(llama(precision=kind, compile=True, hardware=h100)).step_s
        for kind in ("bf16", "float8 rowwise_with_gw_hp", "float8 rowwise")
    )
    assert rows < exact < half


def test_broadcasts_take_longer_the_more_ranks_share():
    rows = [internevo(512, group) for group in (8, 64, 512)]
    took = [after_s(one) - after_s(one, gather_parameters=False) for one in rows]
    assert 0 < took[0] < took[1] < took[2]


def test_products_with_odd_rows_are_slow_where_that_was_measured():
    def head_s(gpu, vocab):
        changed = {"hardware": {"gpu": gpu, "gpus": 8}, "model": {**LLAMA_8B, "vocab": vocab}}
        one = row("torchtitan", parallel={"dp": 8, "zero": 3}, **changed)
        site = Site(shape=one.shape, system=system_of(one), mbs=1, seq=4096)
        product = next(p for p in head(site, vocab) if p.name == "head")
        return product.op.flops, cost([product], ground_of(one))

    for gpu, rate in (("H100-SXM5-80GB", 1.15e14), ("A100-SXM4-80GB", 7.3e13)):
        flops, odd = head_s(gpu, 50257)
        # A long one lets the clock fall a little; the factor of whole runs is not put on top.
        assert odd.forward_s == pytest.approx(flops / rate, rel=0.06)
        assert odd.backward_s == pytest.approx(2 * flops / rate, rel=0.08)
        _, padded = head_s(gpu, 50304)
        assert odd.forward_s > 3 * padded.forward_s
    _, first = head_s("V100-SXM2-16GB", 50257)
    _, second = head_s("V100-SXM2-16GB", 50304)
    assert first.forward_s == pytest.approx(second.forward_s, rel=0.05)


def test_a_width_given_as_a_ratio_is_rounded_up():
    ratio = {**LLAMA_8B, "ffn": 10922, "mlp_ratio": "8/3 (gated)"}
    assert llama(model=ratio).shape.ffn == 11008
    assert llama(model={**LLAMA_8B, "ffn": 10922}).shape.ffn == 10922
    missing = {key: value for key, value in LLAMA_8B.items() if key != "ffn"}
    assert llama(model=missing).shape.ffn == 11008
    assert row(model={**GPT3, "ffn": None}).shape.ffn == 4 * 12288


def after_s(one, stage=0, **changes):
    """Seconds after the last backward of a stage."""
    recipe = recipe_of(one, replace(system_of(one), **changes))
    ground = ground_of(one)
    part = stages_of(one, recipe, ground)[stage]
    return extra_of(one, recipe, ground, part).after_s


def test_all_reduces_under_zero_move_twice_as_much():
    one = internevo(64, 64)
    whole, scattered = (
        after_s(one, gradient_sync="end", broadcasts=False, reduces_all=all_of_them)
        for all_of_them in (True, False)
    )
    nbytes = 2 * one.shape.parameters
    levels = ground_of(one).dp
    saved = collective_time(Primitive.ALL_REDUCE, nbytes, levels)
    saved -= collective_time(Primitive.REDUCE_SCATTER, nbytes, levels)
    assert whole - scattered == pytest.approx(saved) and saved > 0.05


def test_buckets_are_copied_twice_and_adam_moves_more_than_a_fused_one():
    one = internevo(8, 8)
    device, parameters = ground_of(one).device, one.shape.parameters
    rate = device.memory_bandwidth_bytes_per_s * device.efficiency[OpClass.ELEMENTWISE]
    for name, moved in (
        ("bucket_copy_bytes", 8 * parameters),
        ("update_bytes", 60 * parameters / 8),
    ):
        assert after_s(one) - after_s(one, **{name: 0}) == pytest.approx(moved / rate)


def test_a_rank_that_holds_the_embedding_updates_longest():
    few, many = internevo(8, 8), internevo(512, 512)
    assert after_s(few) == after_s(few, whole_parameters=False)
    table = many.shape.vocab * many.shape.hidden
    device = ground_of(many).device
    rate = device.memory_bandwidth_bytes_per_s * device.efficiency[OpClass.ELEMENTWISE]
    # Adam and the copy to half precision, of what the rank has more than its share.
    more = (7 * 4 + 60 + 4 + 2) * (table - many.shape.parameters / 512) / rate
    assert after_s(many) - after_s(many, whole_parameters=False) == pytest.approx(more)
    # Tensor parallelism divides the table, FSDP all of it; other stages have none.
    changed = {"model": LLAMA_8B, "hardware": {"gpu": "A100-SXM4-80GB", "gpus": 512}}
    halves = row("internevo", parallel={"tp": 2, "dp": 256, "zero": 1}, **changed)
    fsdp = row("internevo", parallel={"dp": 512, "zero": 3}, **changed)
    staged = row("internevo", parallel={"pp": 2, "dp": 256, "zero": 1}, **changed)
    assert after_s(fsdp) == after_s(fsdp, whole_parameters=False)
    assert after_s(staged, stage=1) == after_s(staged, stage=1, whole_parameters=False)
    less = after_s(halves) - after_s(halves, whole_parameters=False)
    parts = stages_of(halves, recipe_of(halves, system_of(halves)), ground_of(halves))
    own = table / 2 - parts[0].parameters / 256
    assert less == pytest.approx((7 * 4 + 60 + 4 + 2) * own / rate)


def test_an_optimizer_with_flat_tensors_needs_memory_of_its_own():
    one = internevo(16, 8)
    memory, more = predict(one).memory, predict(internevo(16, 16)).memory
    assert memory.activations_bytes > 0
    # Gradients in half and full precision and two temporaries beside all that the loss needs.
    step, logits = 14 * one.shape.parameters / 8, 2048 * one.shape.vocab
    assert memory.transient_bytes == pytest.approx(step + (16 - 4) * logits)
    assert memory.transient_bytes - more.transient_bytes == pytest.approx(step / 2)
    # FSDP's adapter flattens nothing.
    few, many = (
        predict(row("internevo", model=LLAMA_8B, parallel={"dp": n, "zero": 3, "pp": 1},
                    hardware={"gpu": "A100-SXM4-80GB", "gpus": n})).memory
        for n in (32, 64)
    )  # fmt: skip
    step = 12 * one.shape.parameters / 32
    assert few.transient_bytes - many.transient_bytes == pytest.approx(step / 2)


def test_flash_attention_1_takes_twice_as_long():
    one = internevo(8, 8)
    taken = []
    for slower in (system_of(one).attention_slowdown, 1.0):
        system = replace(system_of(one), attention_slowdown=slower)
        site = Site(shape=one.shape, system=system, mbs=1, seq=2048)
        attend = next(piece for piece in layer(site) if piece.name == "attention")
        taken.append(cost([attend], ground_of(one)))
    assert taken[0].forward_s == 2 * taken[1].forward_s
    assert taken[0].backward_s == 2 * taken[1].backward_s


def test_metrics_read_the_logits_too():
    one = internevo(8, 8)
    forward = []
    for moved in ((38, 14), system_of(one).loss_bytes):
        site = Site(shape=one.shape, system=replace(system_of(one), loss_bytes=moved), mbs=1,
                    seq=2048)  # fmt: skip
        forward.append(cost(head(site, one.shape.vocab), ground_of(one)).forward_s)
    assert forward[1] > forward[0]


def test_one_hot_experts_are_products():
    moe = {**GPT3, "hidden": 1024, "layers": 8, "heads": 16, "ffn": 4096,
           "moe": {"experts": 8, "every": 2}}  # fmt: skip
    one = row("alpa", model=moe, parallel={"dp": 64})
    site = Site(shape=one.shape, system=system_of(one), mbs=8, seq=1024)
    pieces = layer(site, experts=True)
    flops = {p.name: p.op.flops for p in pieces}
    # Two places per token in groups of 1024 tokens.
    assert flops["dispatch"] == flops["combine"] == 2 * 8 * 1024 * 2 * 1024 * 1024
    # Which is kept, in half precision.
    kept = {p.name: p.saved_bytes for p in pieces}
    assert kept["dispatch"] == kept["combine"] == 2 * 8 * 1024 * 2 * 1024


def alpa_experts(experts, shard, zero):
    moe = {"hidden": 1024, "layers": 8, "heads": 16, "vocab": 51200,
           "moe": {"experts": experts, "every": 2}}  # fmt: skip
    hardware = {"gpu": "V100-SXM2-16GB", "gpus": shard, "gpus_per_node": 8}
    parallel, batch = {"dp": shard, "zero": zero}, {"gbs": 8, "mbs": 8 // shard, "seq": 1024}
    return row("alpa", model=moe, hardware=hardware, parallel=parallel, batch=batch)


def test_each_expert_has_a_product_and_a_weight_of_its_own():
    few, many = (alpa_experts(n, 1, 0) for n in (8, 32))
    pieces = [
        {
            p.name: p.op
            for p in layer(Site(shape=r.shape, system=system_of(r), mbs=1, seq=1024), True)
        }
        for r in (few, many)
    ]
    # The same arithmetic on four times the weights, with a quarter of the rows in each product.
    assert pieces[0]["experts up"].flops == pieces[1]["experts up"].flops
    assert [p["experts up"].inputs[0].shape for p in pieces] == [(8, 256, 1024), (32, 64, 1024)]
    assert [p["experts up"].inputs[1].shape[0] for p in pieces] == [8, 32]
    assert predict(many).step_s > predict(few).step_s


def test_alpa_copies_experts_between_two_layouts():
    bandwidth = 900e9

    def more_s(zero):
        one = alpa_experts(8, 4, zero)
        taken = []
        for relays in (False, True):
            system = replace(system_of(one), relays_experts=relays)
            recipe = recipe_of(one, system)
            ground = ground_of(one)
            (part,) = stages_of(one, recipe, ground)
            extra = extra_of(one, recipe, ground, part)
            taken.append(extra.per_forward_s + extra.per_backward_s + extra.after_s)
        return taken[1] - taken[0]

    experts = 4 * alpa_experts(8, 4, 2).shape.expert_parameters
    # Read and written in half precision: for gradients and parameters, or for two gathers and one
    # reduction.
    assert 2 * 4 * experts / bandwidth < more_s(2) < 2 * 4 * experts / bandwidth * 1.4
    assert more_s(3) == pytest.approx(1.5 * more_s(2))


def test_gradients_that_are_reduced_at_once_are_there_whole():
    parallel, hardware = {"dp": 4, "zero": 2}, {"gpu": "V100-SXM2-16GB", "gpus": 4}
    dense = row("alpa", model={**GPT3, "layers": 2}, parallel=parallel, hardware=hardware)
    found = predict(dense).memory.states_bytes / dense.shape.parameters
    assert found == pytest.approx(2 + 2 + 12 / 4)


def test_alpas_model_with_experts_is_the_one_it_counts():
    moe = {"hidden": 1024, "layers": 8, "heads": 32, "vocab": 51200,
           "moe": {"experts": 8, "every": 2}}  # fmt: skip
    one = row("alpa", model=moe, parallel={"dp": 64})
    # Its benchmark counts 0.690395 billion parameters, without positions.
    assert one.shape.parameters == pytest.approx(0.690395e9, rel=5e-3)
    # Adafactor: half-precision weights and gradients, and master weights.
    assert predict(one).memory.states_bytes == pytest.approx(8 * one.shape.parameters)
    dense = row("alpa", model={**GPT3, "layers": 2}, parallel={"dp": 64})
    assert predict(dense).memory.states_bytes == pytest.approx(16 * dense.shape.parameters)


def test_stages_send_parts_over_slow_networks():
    hardware = {"gpu": "V100-SXM2-16GB", "gpus": 16, "instance": "AWS p3.16xlarge (25 Gb/s)"}
    one = row("alpa", hardware=hardware, parallel={"tp": 8, "pp": 2})
    sends = [
        stage_send_s(one, recipe_of(one, system), ground_of(one)) for system in (ALPA, DEEPSPEED)
    ]
    # An eighth over the network, then a gather over NVLink.
    assert sends[1] / 9 < sends[0] < sends[1] / 4


def test_the_page_of_published_runs_says_whose_model_it_is():
    """Until there is one model: here and in the index, above any figure."""
    results = Path(__file__).parents[2] / "docs" / "results"
    page = (results / "published.md").read_text()
    assert page.startswith(HEAD)
    said = "This is not the accuracy of what `meshwright search` predicts"
    assert 0 < page.index(said) < page.index("| table |")
    index = (results / "README.md").read_text()
    assert index.index('**"Published training runs" is not**') < index.index("| what |")

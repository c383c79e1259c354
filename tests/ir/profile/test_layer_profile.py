"""Reading layer profiles: both dialects, order, live tensors at cuts, and what is refused."""

import pytest

from meshwright.ir.errors import PlanError
from meshwright.ir.profile.layer_profile import parse_layer_profile, read_layer_profile

CHAIN = """\
node1 -- Input -- forward_compute_time=0.0, backward_compute_time=0.000, activation_size=8, parameter_size=0
node2 -- fc -- forward_compute_time=2.5, backward_compute_time=5, activation_size=16.000, parameter_size=40
node3 -- loss -- forward_compute_time=0.5, backward_compute_time=1, activation_size=0, parameter_size=0
  node1 -- node2
 \tnode2 -- node3"""  # noqa: E501


def line(node: int, activation: str = "8", name: str = "x") -> str:
    return (
        f"node{node} -- {name} -- forward_compute_time=1, backward_compute_time=2, "
        f"activation_size={activation}, parameter_size=4"
    )


def edges(*pairs: tuple[int, int]) -> list[str]:
    return [f"\tnode{a} -- node{b}" for a, b in pairs]


def test_a_chain() -> None:
    profile = parse_layer_profile(CHAIN, "chain", 2)
    assert [layer.description for layer in profile.layers] == ["Input", "fc", "loss"]
    assert (profile.layers[1].forward_s, profile.layers[1].backward_s) == (0.0025, 0.005)
    assert profile.layers[1].parameter_bytes == 40
    assert profile.edges == ((0, 1), (1, 2))
    assert [profile.cut_bytes(i) for i in range(4)] == [0, 0, 16, 0]
    assert profile.reached == (False, True, True)
    assert profile.sample_s == pytest.approx(0.0045)


def test_layers_out_of_order_run_in_topological_order() -> None:
    lines = [line(10, name="Conv2d(3, 64, kernel_size=(3, 3))"), line(3), line(4), line(2)]
    text = "\n".join(lines + edges((3, 10), (2, 10), (10, 4)))
    profile = parse_layer_profile(text, "graph", 1)
    assert [layer.name for layer in profile.layers] == ["node2", "node3", "node10", "node4"]
    assert profile.edges == ((1, 2), (0, 2), (2, 3))
    assert profile.layers[2].description == "Conv2d(3, 64, kernel_size=(3, 3))"


def test_a_cut_counts_every_live_tensor_once() -> None:
    """1 feeds 2 and, past it, 3 and 4: its tensor crosses three cuts, once each."""
    lines = [line(1, "100"), line(2, "10"), line(3, "1"), line(4, "7")]
    text = "\n".join(lines + edges((1, 2), (1, 3), (1, 4), (2, 3), (3, 4)))
    profile = parse_layer_profile(text, "skip", 1)
    assert [profile.cut_bytes(i) for i in range(1, 5)] == [100, 110, 101, 0]


def test_what_no_parameter_reaches_is_not_sent() -> None:
    """A mask that 1 makes and 3 reads: every stage has it from the batch."""
    mask, layer = line(1, "100").replace("parameter_size=4", "parameter_size=0"), line(2, "10")
    text = "\n".join([mask, layer, line(3), line(4), *edges((1, 2), (1, 3), (2, 3), (3, 4))])
    profile = parse_layer_profile(text, "mask", 1)
    assert [profile.cut_bytes(i) for i in range(1, 5)] == [0, 10, 8, 0]


def test_as_many_tensors_as_readers_go_one_to_each() -> None:
    text = "\n".join([line(1, "[30; 4]"), line(2), line(3), *edges((1, 2), (1, 3), (2, 3))])
    profile = parse_layer_profile(text, "pair", 1)
    assert [(e.nbytes, e.readers) for e in profile.emitted[0]] == [(30, (1,)), (4, (2,))]
    assert [profile.cut_bytes(i) for i in (1, 2)] == [34, 8 + 4]


def test_equal_tensors_of_a_cell_are_one() -> None:
    text = "\n".join([line(1, "[30; 30]"), line(2), line(3), *edges((1, 2), (1, 3), (2, 3))])
    profile = parse_layer_profile(text, "cell", 1)
    assert [(e.nbytes, e.readers) for e in profile.emitted[0]] == [(30, (1, 2))]
    assert [profile.cut_bytes(i) for i in (1, 2)] == [30, 38]


def test_other_counts_of_tensors_go_to_every_reader() -> None:
    text = "\n".join([line(1, "[9; 2; 2]"), line(2), line(3), *edges((1, 2), (1, 3), (2, 3))])
    profile = parse_layer_profile(text, "lstm", 1)
    assert [profile.cut_bytes(i) for i in (1, 2)] == [13, 21]


def test_the_micro_batch_is_in_the_file_name(tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "bert-48-pbs-2.txt"
    path.write_text(CHAIN)
    assert read_layer_profile(path).micro_batch == 2
    assert read_layer_profile(path, 4).micro_batch == 4
    other = tmp_path / "vgg16.txt"
    other.write_text(CHAIN)
    with pytest.raises(PlanError, match=r"vgg16.*-pbs-N"):
        read_layer_profile(other)
    with pytest.raises(PlanError, match=r"missing\.txt"):
        read_layer_profile(tmp_path / "missing.txt", 1)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([line(1), "node2 - oops"], r"line 2: 'node2 - oops' is neither a layer .* nor an edge"),
        ([line(1), line(1)], "line 2: node1 appears twice"),
        ([line(1), line(2), *edges((1, 2), (1, 2))], "line 4: edge node1 -- node2 appears twice"),
        ([line(1), *edges((1, 7))], "line 2: there is no layer node7"),
        ([line(1, "-4")], "line 1: '-4' is not a number"),
        ([line(1, "[8; nan]")], "line 1: 'nan' is not a number"),
        ([line(1).replace("parameter_size", "params")], "line 1: node1 has the fields .*params"),
        ([line(1), line(2), *edges((1, 2), (2, 1))], "circle through node1"),
        ([line(1), *edges((1, 1))], "circle through node1"),
        (["", "  "], "no layers"),
    ],
)
def test_malformed_profiles_name_the_line(lines: list[str], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        parse_layer_profile("\n".join(lines), "bad", 1)

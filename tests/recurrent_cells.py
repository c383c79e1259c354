"""Recurrent layers of every kind, whose memory is told beside what they hold."""

from typing import Any

from torch import Tensor, nn

CELLS = {
    "gru": (nn.GRU, {}, 16),
    "gru of three layers": (nn.GRU, {"num_layers": 3}, 16),
    "gru of two directions": (nn.GRU, {"bidirectional": True, "bias": False}, 16),
    "gru of few samples": (nn.GRU, {"hidden_size": 128, "num_layers": 2}, 1),
    "gru of two layers and directions": (nn.GRU, {"num_layers": 2, "bidirectional": True}, 16),
    "gru with dropout": (nn.GRU, {"num_layers": 3, "dropout": 0.1}, 16),
    "rnn of few samples": (nn.RNN, {"hidden_size": 128, "num_layers": 2}, 1),
    "rnn": (nn.RNN, {"nonlinearity": "relu"}, 16),
    "rnn of three layers": (nn.RNN, {"num_layers": 3, "batch_first": False}, 16),
    "rnn of two directions": (nn.RNN, {"num_layers": 2, "bidirectional": True}, 16),
    "lstm": (nn.LSTM, {}, 16),
    "lstm of two directions": (nn.LSTM, {"num_layers": 2, "bidirectional": True}, 16),
    "lstm of few samples": (nn.LSTM, {"hidden_size": 128, "num_layers": 2}, 1),
    "projected lstm": (nn.LSTM, {"proj_size": 32}, 16),
    "projected lstm of two layers": (nn.LSTM, {"proj_size": 16, "num_layers": 2}, 16),
    "projected lstm of two directions": (nn.LSTM, {"proj_size": 48, "bidirectional": True}, 16),
    "projected lstm of few samples": (nn.LSTM, {"proj_size": 96, "hidden_size": 128}, 1),
}
"""Kinds, arguments and samples; weights have most where samples are few. LSTMs in float64, which
oneDNN does not take."""


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase] = nn.LSTM, **given: Any) -> None:
        super().__init__()
        given = {"input_size": 32, "hidden_size": 64, "batch_first": True, **given}
        self.into, self.layers = nn.Linear(32, 32), kind(**given)
        ways = 1 + given.get("bidirectional", False)
        self.out = nn.Linear((given.get("proj_size") or given["hidden_size"]) * ways, 8)
        self.batch_first = given["batch_first"]

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x if self.batch_first else x.transpose(0, 1))
        return self.out(self.layers(x)[0]).square().mean()

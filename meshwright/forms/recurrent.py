"""A recurrent layer and a linear one as matrices: what a model of torch is, if it is that."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from meshwright.ir.errors import PlanError

_WANTED = (
    "one nn.RNN (tanh, one layer, one direction, batch_first=True) and one nn.Linear that reads "
    "its last state"
)


class Recurrent:
    """s_t = tanh(U x_t + W s_(t-1) + b), and V s_T + c at the end, in float64."""

    def __init__(self, rnn: tuple[str, nn.RNN], linear: tuple[str, nn.Linear]) -> None:
        """`rnn`, `linear`: modules with their paths."""
        (self._rnn_path, layer), (self._linear_path, out) = rnn, linear
        values = {name: p.detach().double() for name, p in layer.named_parameters()}
        self.w_in, self.w_rec = values["weight_ih_l0"].clone(), values["weight_hh_l0"].clone()
        self.b_rec = self.w_in.new_zeros(len(self.w_in))
        if layer.bias:
            self.b_rec = values["bias_ih_l0"] + values["bias_hh_l0"]
        self.w_out = out.weight.detach().double().clone()
        self.b_out = self.w_out.new_zeros(len(self.w_out))
        if out.bias is not None:
            self.b_out = out.bias.detach().double().clone()

    @property
    def layer(self) -> Tensor:
        """U, W and b side by side."""
        return torch.cat([self.w_in, self.w_rec, self.b_rec[:, None]], 1)

    @layer.setter
    def layer(self, found: Tensor) -> None:
        reads = self.w_in.shape[1]
        self.w_in, self.w_rec, self.b_rec = found[:, :reads], found[:, reads:-1], found[:, -1]

    @property
    def head(self) -> Tensor:
        """V and c side by side."""
        return torch.cat([self.w_out, self.b_out[:, None]], 1)

    @head.setter
    def head(self, found: Tensor) -> None:
        self.w_out, self.b_out = found[:, :-1], found[:, -1]

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Yields parameters of the modules by path; of two biases that are added the second is
        zero."""
        first, second = self._rnn_path, self._linear_path
        yield f"{first}weight_ih_l0", self.w_in
        yield f"{first}weight_hh_l0", self.w_rec
        yield f"{first}bias_ih_l0", self.b_rec
        yield f"{first}bias_hh_l0", torch.zeros_like(self.b_rec)
        yield f"{second}weight", self.w_out
        yield f"{second}bias", self.b_out

    def take(self, values: Mapping[str, Tensor]) -> None:
        """Takes what `named` gave."""
        first, second = self._rnn_path, self._linear_path
        self.w_in, self.w_rec = values[f"{first}weight_ih_l0"], values[f"{first}weight_hh_l0"]
        self.b_rec = values[f"{first}bias_ih_l0"] + values[f"{first}bias_hh_l0"]
        self.w_out, self.b_out = values[f"{second}weight"], values[f"{second}bias"]

    def predict(self, x: Tensor) -> Tensor:
        """Returns what the model makes of samples [n, moments, reads]."""
        state = x.new_zeros(len(x), len(self.w_rec), dtype=torch.float64)
        for t in range(x.shape[1]):
            state = torch.tanh(x[:, t].double() @ self.w_in.T + state @ self.w_rec.T + self.b_rec)
        return state @ self.w_out.T + self.b_out


def recurrent_of(model: nn.Module) -> Recurrent:
    """Returns a model as matrices. PlanError says what it has that these are not."""
    layers = [(path, m) for path, m in model.named_modules() if isinstance(m, nn.RNN)]
    linear = [(path, m) for path, m in model.named_modules() if isinstance(m, nn.Linear)]
    if len(layers) != 1 or len(linear) != 1:
        raise PlanError(
            f"the model has {len(layers)} nn.RNN and {len(linear)} nn.Linear; admm trains {_WANTED}"
        )
    (path, layer), (out_path, out) = layers[0], linear[0]
    known = {id(p) for m in (layer, out) for p in m.parameters()}
    others = [name for name, p in model.named_parameters() if id(p) not in known]
    if others:
        raise PlanError(f"the model has a parameter {others[0]!r} besides: admm trains {_WANTED}")
    found = {
        "nonlinearity": layer.nonlinearity, "num_layers": layer.num_layers,
        "bidirectional": layer.bidirectional, "batch_first": layer.batch_first,
        "bias": layer.bias and out.bias is not None,
    }  # fmt: skip
    wanted = {
        "nonlinearity": "tanh", "num_layers": 1, "bidirectional": False, "batch_first": True,
        "bias": True,
    }  # fmt: skip
    for key, value in wanted.items():
        if found[key] != value:
            raise PlanError(
                f"{key} of the model's layers is {found[key]!r}: admm trains {_WANTED}; nearest is "
                f"{key}={value!r}"
            )
    return Recurrent((f"{path}." if path else "", layer), (f"{out_path}." if out_path else "", out))


def check_forward(net: Recurrent, model: nn.Module, x: Tensor) -> None:
    """PlanError if a model makes something else of samples than its matrices do."""
    with torch.no_grad():
        made, wanted = model(x[:2]), net.predict(x[:2])
    if made.shape != wanted.shape or not torch.allclose(made.double(), wanted, atol=1e-5):
        raise PlanError(
            f"the model's forward makes of samples {list(x[:2].shape)} something else, "
            f"{list(made.shape)}, than its layers alone do: admm trains {_WANTED}"
        )

"""A model with a user's own operator, as an entry of the zoo."""

from torch.nn import functional as F

from benchmarks.zoo.entry import Entry
from tests.own_operator import WithOwnOperator, batch

OWN = Entry("own_operator", "plain", WithOwnOperator, batch, F.cross_entropy)

"""What torch raises while it traces: apart from the rest, as its compiler takes a second to import.

Checked on the versions that `ir.torch_private` names.
"""

from torch._dynamo.exc import TorchDynamoException, UserError
from torch._export.verifier import SpecViolationError
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

USER_ERROR = UserError
CONTROL_FLOW = TorchDynamoException
SPEC_ERROR = SpecViolationError
DATA_DEPENDENT = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    GuardOnDataDependentSymNode,
)
UNKNOWN_OPERATOR = UnsupportedOperatorException


def operator_of(error: BaseException) -> str:
    """The operator that an error of the fake mode is about."""
    return str(getattr(error, "func", type(error).__name__))

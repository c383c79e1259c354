"""The errors a user can meet; each names what was given, the rule, the nearest legal value."""

from typing import Self


class MeshwrightError(Exception):
    """Base of all errors this package raises on purpose."""

    everywhere: bool = False
    """Whether all ranks of a job raise it together, so that each may catch it and go on."""

    def on_all_ranks(self) -> Self:
        """Says so, and returns the error."""
        self.everywhere = True
        return self


class TraceError(MeshwrightError):
    """The model cannot be captured; names the operation, the user's source line and a way out."""


class PlanError(MeshwrightError, ValueError):
    """A plan, cluster or other input file breaks a rule."""


class Infeasible(MeshwrightError):
    """No plan meets the constraints; names those in conflict and the nearest relaxation."""


class MismatchError(MeshwrightError):
    """Ranks, or plan and world, do not agree; the run must not start."""


class CheckFailed(MismatchError):
    """What `compile` made does not compute what the model computes in plain PyTorch."""


class NonFinite(MeshwrightError):
    """The loss, the gradients or the parameters are no numbers any more."""

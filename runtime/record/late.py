"""What the device finds and the host reads later, so that the host need not wait in a step."""

import torch
from torch import Tensor


class LateNumber:
    """A number that is copied to the host as soon as the device has it; on a CPU it is there."""

    __slots__ = ("_event", "_value")

    def __init__(self, found: Tensor) -> None:
        self._event: torch.Event | None = None
        # Without a wait the copy lies in pinned memory.
        self._value = found.detach().to("cpu", non_blocking=True)
        if found.device.type == "cuda":
            self._event = torch.Event("cuda")
            self._event.record()

    @property
    def is_late(self) -> bool:
        """Whether reading it may wait for the device."""
        return self._event is not None

    def __float__(self) -> float:
        """Waits for the device to have found it, and for nothing that was begun later."""
        if self._event is not None:
            self._event.synchronize()
        return float(self._value)

"""Copies from the device to the host, which wait for nothing that was launched after them."""

import torch
from torch import Tensor


class Arriving:
    """A tensor that was sent to the host; work that the device gets later does not delay it."""

    def __init__(self, tensor: Tensor) -> None:
        self._host = tensor.to("cpu", non_blocking=True)
        self._event = torch.cuda.Event() if tensor.is_cuda else None  # type: ignore[no-untyped-call]
        if self._event is not None:
            self._event.record()

    def wait(self) -> Tensor:
        if self._event is not None:
            self._event.synchronize()
        return self._host

"""A choice that is a vector: it is made at once, and there is no text to go on with."""

from collections.abc import Sequence

from penstock.schemas.event import Delta, FinishReason
from penstock.schemas.params.pooling import from_base64, to_base64
from penstock.worker.engine.io.messages import Output
from penstock.worker.text.completion import TextPiece


class Pooled:
    """The vector of one prompt, in the place of a `Completion`.

    labels  a classifier's: the likeliest one is the choice's text; none where there are no classes
    """

    def __init__(self, labels: Sequence[str] = ()) -> None:
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self._labels = labels

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    def take(self, output: Output) -> TextPiece:
        """Take the vector, with which the choice ends."""
        vector = to_base64(output.vector or b"")
        self.token_ids, self.finish_reason = output.token_ids, output.finish_reason
        return TextPiece(
            output.token_ids, self._label(vector), None, output.finish_reason, None, vector
        )

    @property
    def num_reasoning(self) -> int:
        return 0

    def anew(self) -> "Pooled":
        return Pooled(self._labels)

    def replay(self, delta: Delta) -> None:
        self.token_ids, self.finish_reason = delta.token_ids, delta.finish_reason

    def _label(self, vector: str) -> str:
        if not self._labels:
            return ""
        numbers = from_base64(vector)
        return self._labels[numbers.index(max(numbers))]

"""Sequences as they end: with what token, or with what error."""

from penstock.schemas.errors import InvalidJob, PenstockError, WorkerFailed
from penstock.schemas.event import FinishReason
from penstock.worker.engine.io.messages import Output
from penstock.worker.engine.sequences.sequence import Sequence


def end_of(seq: Sequence, token_id: int) -> tuple[FinishReason | None, int | None]:
    """Return why the sequence ends with this token, and the id in `stop_token_ids` that ended it.

    Both are None where the sequence goes on; the id is None where something else ended it.
    """
    if token_id in seq.stop_ids:
        return "stop", token_id if token_id in seq.params.stop_token_ids else None
    if seq.constraint is not None and seq.constraint.is_complete:
        return "stop", None
    if len(seq.token_ids) >= seq.num_prompt + seq.max_tokens:
        return "length", None
    repeats = seq.params.repetition_detection
    if repeats is not None and repeats.ends(seq.token_ids[seq.num_prompt :]):
        return "repetition", None
    return None, None


def why_no_token(seq: Sequence) -> PenstockError:
    outputs = seq.params.structured_outputs
    if outputs is not None and seq.constraint is not None and seq.constraint.error is not None:
        field = outputs.asked_as or "structured_outputs"
        return InvalidJob(f"{field}: {seq.constraint.error}", field)
    for name in ("allowed_token_ids", "bad_words"):
        if getattr(seq.params, name):
            why = "no token is left that may come next; forbid fewer"
            return InvalidJob(f"{name}: {why}", name)
    return WorkerFailed(
        "the model's logits for the next token were no numbers (NaN), or all ruled out"
    )


def refusal(seq_id: str, error: PenstockError) -> Output:
    return Output(seq_id=seq_id, token_ids=[], error=error.body())

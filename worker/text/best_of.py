"""The ranking of several answers to one prompt, of which the best are shown."""

from penstock.schemas.params.sampling import SamplingParams


def with_logprobs(params: SamplingParams) -> SamplingParams:
    """Return the parameters for sequences whose tokens' log probabilities are summed."""
    return params if params.logprobs is not None else params.model_copy(update={"logprobs": 0})


def mean_logprob(total: float, num_tokens: int) -> float:
    """Return by what candidates are ranked; one without a token is the last."""
    return total / num_tokens if num_tokens else float("-inf")

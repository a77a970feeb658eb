"""Sequences as they begin: what jobs add to the engine."""

from penstock.worker.engine.io.limits import EngineLimits
from penstock.worker.engine.io.messages import AddSequence, Logprob
from penstock.worker.engine.sampling.beam_search import num_candidates
from penstock.worker.engine.sampling.sampler_row import SamplerRow
from penstock.worker.engine.sequences.sequence import Sequence


def sequence_of(addition: AddSequence, limits: EngineLimits) -> Sequence:
    """Return the sequence that an addition asks for, before its grammar is there."""
    params, num_prompt = addition.params, len(addition.prompt)
    token_ids = addition.prompt + addition.completion
    ends = frozenset() if params.ignore_eos else limits.eos_token_ids
    # A tokenizer may have ids that the head has no row for: nobody can draw them.
    bad_words = [ids for ids in addition.words.bad_words if max(ids) < limits.vocab_size]
    words = addition.words._replace(bad_words=bad_words)
    stop_ids = ends | frozenset(params.stop_token_ids)
    return Sequence(
        seq_id=addition.seq_id,
        params=params,
        token_ids=token_ids,
        num_prompt=num_prompt,
        max_tokens=limits.max_tokens(num_prompt, params),
        stop_ids=stop_ids,
        cache_salt=addition.cache_salt,
        priority=addition.priority,
        turn=addition.turn,
        # The last token was drawn, and nothing computed of it.
        num_before=len(token_ids) - 1 if addition.completion else 0,
        sampling=SamplerRow(
            params,
            addition.seed,
            addition.choice,
            token_ids,
            num_prompt,
            words,
            num_candidates(params, stop_ids),
        ),
        prompt_logprobs=_unscored(addition),
        group="" if params.use_beam_search else addition.group,
        owner=addition.owner,
        weight=addition.weight,
        is_beam=params.use_beam_search,
    )


def _unscored(addition: AddSequence) -> list[Logprob] | None:
    """Return where its prompt's log probabilities go; None for no list: with the first token."""
    is_asked = addition.params.prompt_logprobs is not None and not addition.completion
    return [] if is_asked else None

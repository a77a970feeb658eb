"""The class `LLM`: a model in this process (offline inference), without a queue or Redis.

llm = LLM(model="path/to/model")
for output in llm.generate(["Once upon a time"], SamplingParams(max_tokens=64)):
    print(output.outputs[0].text)
"""

import gc
import itertools
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from pydantic import JsonValue, ValidationError

from penstock.schemas.errors import InvalidJob, PenstockError, WorkerFailed
from penstock.schemas.event import ErrorBody, FinishReason, TokenLogprob
from penstock.schemas.job import Chat, Message, Prompt
from penstock.schemas.params.pooling import PoolingParams, PoolingTask, floats_of
from penstock.schemas.params.sampling import SamplingParams
from penstock.worker.engine.io.messages import AddSequence, Output
from penstock.worker.engine_loader import load_engine
from penstock.worker.process.sampling_defaults import load_generation
from penstock.worker.process.settings import WorkerSettings
from penstock.worker.progress import Progress
from penstock.worker.text.answer_form import AnswerForm, refuse_budget
from penstock.worker.text.best_of import mean_logprob, with_logprobs
from penstock.worker.text.completion import Completion
from penstock.worker.text.model_tokenizer import ModelTokenizer, load_tokenizer
from penstock.worker.text.text_inputs import read_inputs

__all__ = ["LLM", "CompletionOutput", "PoolingParams", "RequestOutput", "SamplingParams"]

PromptMapping = Mapping[str, str | list[int]]
AnyPrompt = str | list[int] | PromptMapping
AnyParams = SamplingParams | Sequence[SamplingParams] | None
Asked = TypeVar("Asked")
Made = TypeVar("Made")
_WAIT_S = 0.1  # at most; a grammar may be compiling


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One answer.

    schema_error  why it is not what its schema says, where that could be held only in part
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    schema_error: str | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The answers to one prompt. `prompt` is None for ids and for a conversation.

    prompt_logprobs  one for each token of the prompt, where they are asked for; None for the
                     first, which has nothing before it
    """

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int
    prompt_logprobs: list[TokenLogprob | None] | None = None


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    embedding: list[float]


@dataclass(frozen=True, slots=True)
class ClassificationOutput:
    """The numbers of the labels, in the order of the model's configuration."""

    probs: list[float]


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    score: float


@dataclass(frozen=True, slots=True)
class PoolingRequestOutput(Generic[Made]):
    """The vector of one prompt, or of a pair of texts, whose ids stand one after the other."""

    prompt_token_ids: list[int]
    outputs: Made


@dataclass(slots=True, eq=False)
class _Request:
    prompt: str | None
    prompt_ids: list[int]
    params: SamplingParams
    completions: list[Completion]
    num_cached: int = 0
    totals: dict[int, float] = field(default_factory=dict)  # log probabilities, with `best_of`

    def output(self) -> RequestOutput:
        places = [*range(len(self.completions))]
        if self.totals:
            places = sorted(places, key=self._mean, reverse=True)[: self.params.n]
        outputs = [
            _completion_output(index, self.completions[at]) for index, at in enumerate(places)
        ]
        scores = self.completions[0].prompt_logprobs
        prompt_logprobs = None if scores is None else [None, *scores[1:]]
        return RequestOutput(
            self.prompt, self.prompt_ids, outputs, self.num_cached, prompt_logprobs
        )

    def _mean(self, choice: int) -> float:
        return mean_logprob(self.totals[choice], len(self.completions[choice].token_ids))


class LLM:
    """A model and its engine. The settings are those of `penstock worker`, with underscores.

    One thread at a time may call it. Answers come in the order of the prompts. If one prompt
    cannot run, none does: the error names the field, and a note on it gives the prompt's place.
    """

    def __init__(self, model: str, **settings: object) -> None:
        if extras := settings.keys() - WorkerSettings.model_fields.keys():
            raise InvalidJob(f"{', '.join(sorted(extras))}: no such setting", min(extras))
        try:
            # Unlike a worker's, these come from the call alone, not from the environment.
            self._settings = WorkerSettings.model_validate({"model": str(model), **settings})
        except ValidationError as error:
            raise _refusal(error) from error
        if self._settings.kv_events is not None:
            sentence = "tells routers of a worker's cache, and LLM is none; leave it out"
            raise InvalidJob(f"kv_events_config: {sentence}", "kv_events_config")
        if self._settings.sleep_idle_s is not None:
            sentence = "lets a worker sleep, and LLM is none; leave it out"
            raise InvalidJob(f"sleep_idle_s: {sentence}", "sleep_idle_s")
        self._text = load_tokenizer(self._settings)
        generation = load_generation(self._settings)
        self._engine = load_engine(self._settings)
        self._generation = generation.without(self._engine.limits.unsupported_fields)
        self._numbers = itertools.count()

    @property
    def text(self) -> ModelTokenizer:
        """The model's tokenizer."""
        return self._text

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters that count where none are given.

        They are the model's own defaults, and the usual ones where the model has none.
        """
        return SamplingParams.model_validate(self._generation.defaults)

    @property
    def max_model_len(self) -> int:
        """Return the number of tokens that a prompt and its completion may have together."""
        return self._engine.limits.max_model_len

    def generate(
        self,
        prompts: AnyPrompt | Sequence[AnyPrompt],
        sampling_params: AnyParams = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete one prompt or several.

        A prompt is a text, a list of token ids, or a mapping with the text under "prompt" or the
        ids under "prompt_token_ids".
        """
        prompt_list = _several_prompts(prompts)
        requests = []
        for place, (prompt, params) in enumerate(self._with_params(prompt_list, sampling_params)):
            with _noted(place):
                text, token_ids = _read(prompt)
                room = self._engine.limits.prompt_room(params)
                ids = self._text.prompt_ids(token_ids if text is None else text, params, room)
                refuse_budget(params)
                form = AnswerForm(None, params.structured_outputs)
                requests.append(self._request(text, ids, params, form))
        return self._answer(requests, use_tqdm)

    def chat(
        self,
        messages: list[Message] | list[list[Message]],
        sampling_params: AnyParams = None,
        use_tqdm: bool = True,
        tools: list[dict[str, JsonValue]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: dict[str, JsonValue] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, as the model's own template writes them."""
        requests = []
        conversations = _several_conversations(messages)
        for place, (conversation, params) in enumerate(
            self._with_params(conversations, sampling_params)
        ):
            with _noted(place):
                try:
                    chat = Chat(
                        messages=conversation,
                        tools=tools or [],
                        template_kwargs=chat_template_kwargs or {},
                        add_generation_prompt=add_generation_prompt,
                        continue_final_message=continue_final_message,
                    )
                except ValidationError as error:
                    raise _refusal(error) from error
                ids = self._text.render(chat, params, self._engine.limits.prompt_room(params))
                form = self._text.answer_form(chat, ids, params, holds_tags=True)
                requests.append(self._request(None, ids, params, form))
        return self._answer(requests, use_tqdm)

    def embed(
        self,
        prompts: AnyPrompt | Sequence[AnyPrompt],
        *,
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool = True,
    ) -> list[PoolingRequestOutput[EmbeddingOutput]]:
        """Return the embedding of one prompt or of each of several."""
        results = self._pooled(_texts_or_ids(prompts), "embed", pooling_params, use_tqdm)
        return [PoolingRequestOutput(ids, EmbeddingOutput(numbers)) for ids, numbers in results]

    def classify(
        self,
        prompts: AnyPrompt | Sequence[AnyPrompt],
        *,
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool = True,
    ) -> list[PoolingRequestOutput[ClassificationOutput]]:
        """Return the probabilities of one prompt's labels, or of each of several prompts'."""
        results = self._pooled(_texts_or_ids(prompts), "classify", pooling_params, use_tqdm)
        return [
            PoolingRequestOutput(ids, ClassificationOutput(numbers)) for ids, numbers in results
        ]

    def score(
        self,
        data_1: str | list[str],
        data_2: str | list[str],
        *,
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool = True,
    ) -> list[PoolingRequestOutput[ScoringOutput]]:
        """Return how well each text of `data_2` goes with the one of `data_1`, or with its own."""
        queries, texts = ([data] if isinstance(data, str) else data for data in (data_1, data_2))
        if len(queries) not in (1, len(texts)):
            raise InvalidJob(f"data_1: give one text, or {len(texts)}, one for each", "data_1")
        params = (pooling_params or PoolingParams()).model_copy(update={"queries": queries})
        results = self._pooled(texts, "score", params, use_tqdm)
        return [PoolingRequestOutput(ids, ScoringOutput(numbers[0])) for ids, numbers in results]

    def _pooled(
        self,
        prompts: Sequence[Prompt],
        task: PoolingTask,
        params: PoolingParams | None,
        use_tqdm: bool,
    ) -> list[tuple[list[int], list[float]]]:
        """Return the ids and the numbers of each prompt, in their order."""
        params = (params or PoolingParams()).model_copy(update={"task": task})
        inputs = read_inputs(self._text, prompts, params, self._engine.limits)
        params, sampling = params.model_copy(update={"queries": []}), SamplingParams()
        places, vectors = dict[str, int](), dict[int, list[float]]()
        for place, (ids, split) in enumerate(inputs):
            seq_id = str(next(self._numbers))
            places[seq_id] = place
            self._engine.add(AddSequence(seq_id, ids, sampling, pooling=params, split=split))
        try:
            with Progress(len(inputs), use_tqdm) as progress:
                while len(vectors) < len(inputs):
                    self._engine.wait(_WAIT_S)
                    for output in self._engine.step():
                        if output.error is not None:
                            raise _error(output.error)
                        if output.seq_id in places:
                            vectors[places[output.seq_id]] = floats_of(output.vector or b"")
                            progress.note(1, 1)
        finally:
            for seq_id, place in places.items():
                if place not in vectors:
                    self._engine.cancel(seq_id)
        return [(ids, vectors[place]) for place, (ids, _) in enumerate(inputs)]

    def _with_params(
        self, prompts: list[Asked], params: AnyParams
    ) -> list[tuple[Asked, SamplingParams]]:
        """Return each prompt with its parameters.

        Parameters that are given count as they are; the model's defaults are not added to them.
        """
        if params is None or isinstance(params, SamplingParams):
            common = self.get_default_sampling_params() if params is None else params
            return [(prompt, common) for prompt in prompts]
        if len(params) != len(prompts):
            raise InvalidJob(
                f"sampling_params: {len(params)} for {len(prompts)} prompts; give one, or one each",
                "sampling_params",
            )
        return list(zip(prompts, params, strict=True))

    def _request(
        self,
        prompt: str | None,
        ids: list[int],
        params: SamplingParams,
        form: AnswerForm,
    ) -> _Request:
        """Return the request, whose answers have a form."""
        limits = self._engine.limits
        params = params.model_copy(update={"structured_outputs": form.structure})
        error = limits.check(AddSequence("", ids, params))
        if error is not None:
            raise error
        completions = [
            Completion(self._text, params, limits.eos_token_ids, ids, form.markup)
            for _ in range(params.num_sequences)
        ]
        return _Request(prompt, ids, params, completions)

    def _answer(self, requests: list[_Request], use_tqdm: bool) -> list[RequestOutput]:
        running: dict[str, tuple[_Request, int]] = {}
        try:
            for request in requests:
                self._begin(request, running)
            with _collecting_little(), Progress(len(requests), use_tqdm) as progress:
                while running:
                    self._engine.wait(_WAIT_S)
                    for output in self._engine.step():
                        self._take(output, running, progress)
        finally:
            for seq_id in running:  # an error or an interrupt: the engine is to be free again
                self._engine.cancel(seq_id)
        return [request.output() for request in requests]

    def _begin(self, request: _Request, running: dict[str, tuple[_Request, int]]) -> None:
        seed = request.params.seed
        seed = secrets.randbits(63) if seed is None else seed
        words = self._text.word_ids(request.params)
        params, num_seqs = request.params, request.params.num_sequences
        if num_seqs > params.n:
            params, request.totals = with_logprobs(params), dict.fromkeys(range(num_seqs), 0.0)
        group = f"{next(self._numbers)}" if num_seqs > 1 else ""
        for choice in range(num_seqs):
            seq_id = str(next(self._numbers))
            running[seq_id] = request, choice
            self._engine.add(
                AddSequence(
                    seq_id,
                    request.prompt_ids,
                    params,
                    seed,
                    choice,
                    words=words,
                    group=group,
                )
            )

    def _take(
        self, output: Output, running: dict[str, tuple[_Request, int]], progress: Progress
    ) -> None:
        if output.seq_id not in running:
            return
        if output.error is not None:
            raise _error(output.error)
        request, choice = running[output.seq_id]
        completion = request.completions[choice]
        piece = completion.take(output)
        if request.totals:
            logprobs = (output.logprobs or [])[: len(piece.token_ids)]
            request.totals[choice] += sum(logprob.logprob for logprob in logprobs)
        if choice == 0:
            request.num_cached = output.num_cached
        if completion.is_finished:
            del running[output.seq_id]
            if output.finish_reason is None:  # a stop string ended it
                self._engine.cancel(output.seq_id)
        is_done = completion.is_finished and all(peer.is_finished for peer in request.completions)
        progress.note(len(output.token_ids), int(is_done))


@contextmanager
def _collecting_little() -> Iterator[None]:
    """Let the garbage collector look only at what is made within this context.

    To go through all that was imported takes it 130 ms.
    """
    if gc.get_freeze_count():  # whoever froze the objects wants them to stay so
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _several_prompts(prompts: AnyPrompt | Sequence[AnyPrompt]) -> list[AnyPrompt]:
    if isinstance(prompts, str | Mapping):
        return [prompts]
    ids = [token_id for token_id in prompts if isinstance(token_id, int)]
    if ids and len(ids) == len(prompts):
        return [ids]
    return [prompt for prompt in prompts if not isinstance(prompt, int)]


def _texts_or_ids(prompts: AnyPrompt | Sequence[AnyPrompt]) -> list[Prompt]:
    """Return prompts of all forms as texts and lists of ids. An empty text is one, too."""
    prompt_list = _several_prompts(prompts)
    read = [("", []) if prompt == "" else _read(prompt) for prompt in prompt_list]
    return [ids if text is None else text for text, ids in read]


def _several_conversations(
    messages: list[Message] | list[list[Message]],
) -> list[list[Message]]:
    single = [message for message in messages if isinstance(message, dict)]
    return (
        [single]
        if single or not messages
        else [chat for chat in messages if isinstance(chat, list)]
    )


def _read(prompt: AnyPrompt) -> tuple[str | None, list[int]]:
    """Return the prompt's text or None, and its ids, which are empty for a text."""
    if not prompt:
        raise InvalidJob("prompt: it is empty; give at least one token", "prompt")
    if isinstance(prompt, Mapping):
        values = [prompt[key] for key in ("prompt_token_ids", "prompt") if key in prompt]
        if not values:
            raise InvalidJob('prompt: give "prompt" or "prompt_token_ids"', "prompt")
        return _read(values[0])
    if isinstance(prompt, str):
        return prompt, []
    if not all(isinstance(token_id, int) for token_id in prompt):
        raise InvalidJob("prompt: give a text or a list of token ids", "prompt")
    return None, list(prompt)


@contextmanager
def _noted(place: int) -> Iterator[None]:
    try:
        yield
    except PenstockError as error:
        error.add_note(f"in prompt {place}, counted from 0")
        raise


def _completion_output(index: int, completion: Completion) -> CompletionOutput:
    choice = completion.choice(index)
    return CompletionOutput(
        index=index,
        text=choice.text,
        token_ids=choice.token_ids,
        logprobs=choice.logprobs,
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
        schema_error=choice.schema_error,
    )


def _refusal(error: ValidationError) -> InvalidJob:
    first = error.errors(include_url=False)[0]
    field = ".".join(map(str, first["loc"]))
    return InvalidJob(f"{field}: {first['msg']}", field)


def _error(body: ErrorBody) -> PenstockError:
    """Return the engine's error for a sequence as an exception to raise."""
    kind = InvalidJob if body.status < 500 else WorkerFailed
    error = kind(body.message, body.param)
    error.code, error.status, error.retryable = body.code, body.status, body.retryable
    return error

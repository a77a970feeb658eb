"""A job, as a caller enqueued it. It is stored once, as JSON, and never changed."""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Annotated, Literal, Self

from pydantic import Field, JsonValue, model_validator

from penstock.schemas.counted import counted
from penstock.schemas.errors import AnswerTooLarge, PromptTooLong
from penstock.schemas.params.pooling import MAX_INPUTS, PoolingParams
from penstock.schemas.params.sampling import SamplingParams, TokenId
from penstock.schemas.params.text import MAX_TEXT_IDS, TextParams
from penstock.schemas.wire.wire import Wire, at_most_bytes

MAX_PROMPTS = 64
MAX_ANSWERS = 1024  # answers of a job: prompts times n
MAX_MESSAGES = 2048
MAX_METADATA_BYTES = 512  # the longest name or value
YEAR_MS = 365 * 86_400_000
MOST_PRIORITY = 2**50
LAST_MS = 4_102_444_800_000  # the year 2100, as unix time
CHARS_A_TOKEN = 4  # for guesses
COMPLETION_TOKENS = 256  # expected of a choice that may make as many as the context allows
MANY_BYTES = 2**20
MAX_ANSWER_BYTES = 2**28  # in memory, where an answer is made or read; stored, it takes less
TOKEN_BYTES = 256  # memory that a token takes of MAX_ANSWER_BYTES
LOGPROB_BYTES = 256  # and each log probability: the token's own, and its alternatives'
MAX_SCORES_BYTES = 2**23  # log probabilities of one prompt, which come in one event
VECTOR_BYTES = 2**15  # memory that the vector of a pooled prompt takes
CONTEXT_TOKENS = 2**15  # context of a model that does not say how many tokens it takes
DEFAULT_TENANT = "default"
TRACEPARENT = "00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}"  # as W3C has it

PriorityClass = Literal["high", "normal", "batch"]
QueueClass = Literal["text"] | PriorityClass
Prompt = str | Annotated[list[TokenId], Field(fail_fast=True)]
Short = Annotated[str, at_most_bytes(MAX_METADATA_BYTES)]
Message = dict[str, JsonValue]


class Chat(Wire):
    """A conversation, rendered by the model's own chat template in the worker."""

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    tools: list[dict[str, JsonValue]] = Field(default_factory=list, max_length=128)
    template_kwargs: dict[str, JsonValue] = Field(default_factory=dict)
    chat_template: str | None = Field(
        None, max_length=65_536, description="in place of the model's, where its workers trust it"
    )
    tool_choice: Literal["auto", "required"] = Field(
        "auto", description="required: the answer is a call; auto: as the model likes"
    )
    callable_tools: list[str] = Field(
        default_factory=list, max_length=128, description="names of tools; none: all may be called"
    )
    parallel_tool_calls: bool | None = Field(
        None, description="several calls; none: with auto yes, else one"
    )
    thinking_budget: int | None = Field(
        None, ge=0, le=2**31 - 1, description="tokens of thinking; of a model that thinks"
    )
    add_generation_prompt: bool = True
    continue_final_message: bool = False


class Job(Wire):
    """A job has one claim, one log and one end, and `len(prompts) * n` sequences in the engine.

    Choice `i` answers prompt `i // n`. Without a seed the job's id seeds it, so every attempt at
    the job draws the same tokens. With `pooling` or `text` no tokens are drawn: each prompt gets a
    vector, or what the tokenizer makes of it, which counts as one token in its log.
    """

    job_id: str
    model: str
    prompts: list[Prompt] = Field(default_factory=list, max_length=MAX_INPUTS)
    chat: Chat | None = None
    params: SamplingParams = SamplingParams()
    tenant: str = DEFAULT_TENANT
    priority_class: QueueClass = Field("normal", description="text: of jobs of `text` alone")
    priority: int = Field(
        0, ge=-MOST_PRIORITY, le=MOST_PRIORITY, description="lower first within an account's class"
    )
    background: bool = Field(False, description="runs on although nobody listens")
    timeout_ms: int | None = Field(None, ge=1, le=YEAR_MS, description="from submission to the end")
    queue_timeout_ms: int | None = Field(
        None, ge=1, le=YEAR_MS, description="until it is started, from when it may be"
    )
    not_before_ms: int | None = Field(
        None, ge=0, le=LAST_MS, description="unix time until which it waits"
    )
    delay_ms: int | None = Field(None, ge=0, le=YEAR_MS, description="the same, from submission")
    over_limit: Literal["refuse", "wait"] = Field(
        "refuse", description="above the rates and budgets of the account"
    )
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    prompt_cache_key: Annotated[str, Field(min_length=1, max_length=1024)] | None = Field(
        None, description="shared by jobs whose prompts begin alike; of a chat its first question"
    )
    metadata: dict[Short, Short] = Field(default_factory=dict, max_length=16)
    pooling: PoolingParams | None = None
    text: TextParams | None = None
    stream_interval: int = Field(
        1, ge=1, le=1024, description="tokens of a choice that come together, after its first"
    )
    return_token_ids: bool = Field(False, description="a choice tells its prompt's ids")
    repeated: dict[str, JsonValue] = Field(
        default_factory=dict, description="of the request, what an API repeats that keeps both"
    )
    traceparent: Annotated[str, Field(pattern=f"^{TRACEPARENT}$")] | None = None

    @property
    def is_deterministic(self) -> bool:
        """Return whether another job that asks the same gets the same."""
        is_greedy = self.params.temperature == 0 or self.params.seed is not None
        return self.text is None and (self.pooling is not None or is_greedy)

    @property
    def affinity(self) -> str | None:
        """Return what the tenant's jobs share whose prompts begin alike; None if nothing is known.

        The turns of a conversation share their first question.
        """
        begin = self.prompt_cache_key
        if begin is None and self.chat is not None:
            questions = (message for message in self.chat.messages if message.get("role") == "user")
            begin = repr(_said(next(questions, {})))
        if begin is None:
            return None
        prefix = repr((self.tenant, self.cache_salt, begin))
        return hashlib.blake2b(prefix.encode(), digest_size=12).hexdigest()

    @property
    def seed(self) -> int:
        """Return the seed that is given, or one that every attempt at the job shares."""
        if self.params.seed is not None:
            return self.params.seed
        return int.from_bytes(hashlib.blake2b(self.job_id.encode(), digest_size=7).digest(), "big")

    @model_validator(mode="after")
    def asks_something(self) -> Self:
        if bool(self.prompts) == (self.chat is not None):
            options = "at least one" if self.pooling else "either prompts or chat"
            raise ValueError(f"prompts: give {options}")
        if self.pooling is None and len(self.prompts) > MAX_PROMPTS:
            raise ValueError(f"prompts: give at most {MAX_PROMPTS}; there are {len(self.prompts)}")
        # Of an empty text an encoder has its special tokens.
        if self.text is None and any(
            prompt == [] or (not prompt and not self.pooling) for prompt in self.prompts
        ):
            raise ValueError("prompts: a prompt is empty; give at least one token")
        num_drawn, name = self.params.num_drawn, "best_of" if self.params.best_of else "n"
        if self.pooling is None and max(1, len(self.prompts)) * num_drawn > MAX_ANSWERS:
            raise ValueError(
                f"{name}: {counted(len(self.prompts), 'prompt')} x {name}={num_drawn} are more than"
                f" {MAX_ANSWERS} answers; ask for fewer"
            )
        if self.params.suffix is not None and self.chat is not None:
            raise ValueError("suffix: goes with prompts; a chat has none")
        if self.not_before_ms is not None and self.delay_ms is not None:
            raise ValueError("not_before_ms: give either it or delay_ms")
        return self

    @model_validator(mode="after")
    def pools_what_can_be_pooled(self) -> Self:
        if self.pooling is None:
            return self
        if self.chat is not None or self.params != SamplingParams():
            raise ValueError("pooling: goes with prompts, and with no sampling parameters")
        is_score, num_queries = self.pooling.task == "score", len(self.pooling.queries)
        if not is_score and num_queries:
            raise ValueError("queries: only scores have them")
        if is_score and num_queries not in (1, len(self.prompts)):
            raise ValueError(f"queries: give one, or {len(self.prompts)}, one for each text")
        if is_score and not all(isinstance(prompt, str) for prompt in self.prompts):
            raise ValueError("prompts: give texts; token ids cannot be scored")
        return self

    @model_validator(mode="after")
    def asks_the_tokenizer_for_what_it_knows(self) -> Self:
        if self.text is None:
            if self.priority_class == "text":
                raise ValueError("priority_class: text is for jobs of `text` alone")
            return self
        if self.pooling is not None or self.params.num_drawn != 1:
            raise ValueError("text: goes with no pooling, and with one answer a prompt")
        has_ids = all(isinstance(prompt, list) for prompt in self.prompts) and self.prompts
        if self.text.task == "detokenize" and not has_ids:
            raise ValueError("prompts: give lists of token ids")
        return self

    @property
    def num_choices(self) -> int:
        return max(1, len(self.prompts)) * self.params.n

    def answer_bytes(self, num_tokens: int, num_scored: int) -> int:
        """Return about how many bytes an answer takes in memory.

        num_scored  tokens of prompts whose log probabilities are in it
        """
        size = _logprob_bytes(self.params.prompt_logprobs)
        return self.answer_bytes_a_token() * num_tokens + size * num_scored

    def answer_bytes_a_token(self) -> int:
        """Return about how many bytes each token of the answer takes in memory."""
        if self.pooling is not None:
            return TOKEN_BYTES + VECTOR_BYTES
        return TOKEN_BYTES + _logprob_bytes(self.params.num_told)

    def refuse_large_scores(self, prompts: Iterable[Sequence[int]]) -> None:
        """Raise AnswerTooLarge where log probabilities of prompts may take more than they can."""
        size = _logprob_bytes(self.params.prompt_logprobs)
        if not size:
            return
        lengths = [len(prompt) for prompt in prompts]
        longest, most = max(lengths, default=0), MAX_SCORES_BYTES // size
        if longest > most:
            raise AnswerTooLarge(
                f"prompt_logprobs: a prompt of {longest} tokens; with"
                f" {self.params.prompt_logprobs} alternatives each it may have {most}. Ask for"
                " fewer alternatives, or score it in parts",
                "prompt_logprobs",
            )
        num_drawn = self.params.num_drawn
        num_tokens, most = sum(lengths) * num_drawn, MAX_ANSWER_BYTES // size
        if num_tokens > most:
            raise AnswerTooLarge(
                f"prompt_logprobs: {num_tokens} tokens of prompts, each for n={num_drawn}"
                f" choices, are more than {most}; ask for fewer prompts or choices",
                "prompt_logprobs",
            )

    def refuse_many_ids(self, prompts: Iterable[Sequence[int]]) -> None:
        """Raise AnswerTooLarge where each choice's copy of its prompt's ids is too much."""
        num_ids = sum(map(len, prompts)) * self.params.n
        if self.return_token_ids and num_ids > MAX_TEXT_IDS:
            raise AnswerTooLarge(
                f"return_token_ids: {num_ids} ids of prompts, each for n={self.params.n} choices,"
                f" are more than {MAX_TEXT_IDS}; ask for fewer prompts or choices",
                "return_token_ids",
            )

    def refuse_long_ids(self, max_model_len: int | None) -> None:
        """Raise PromptTooLong for a prompt of token ids that no worker could take."""
        lengths = (len(prompt) for prompt in self.prompts if isinstance(prompt, list))
        longest = 0 if self.pooling or self.text else max(lengths, default=0)
        if max_model_len and longest >= max_model_len:
            raise PromptTooLong(longest, max_model_len)

    def refuse_large_answer(self, max_model_len: int | None) -> None:
        """Raise AnswerTooLarge where all choices together may take more than an answer can."""
        if self.pooling is not None or self.text is not None:
            return
        params, num_prompts = self.params, max(1, len(self.prompts))
        context = max_model_len or CONTEXT_TOKENS
        num_tokens = min(params.max_tokens or context, context)
        size = self.answer_bytes_a_token()
        num_drawn = params.num_drawn
        if num_prompts * num_drawn * num_tokens * size > MAX_ANSWER_BYTES:
            most = MAX_ANSWER_BYTES // (num_prompts * num_drawn * size)
            logprobs = "" if params.logprobs is None else f" with {params.logprobs} logprobs each"
            raise AnswerTooLarge(
                f"max_tokens: {counted(num_prompts, 'prompt')} x n={num_drawn} x {num_tokens}"
                f" tokens{logprobs} may take more than {MAX_ANSWER_BYTES} bytes; give max_tokens of"
                f" at most {most}, or"
                " fewer prompts, choices or logprobs",
                "max_tokens",
            )

    def dump_and_digest(self) -> tuple[str, str]:
        """Return the job's JSON, and a digest of what it asks, which leaves out id and trace."""
        text = self.dump()
        body = text.removeprefix(f'{{"job_id":"{self.job_id}"').removesuffix("}")
        body = body.removesuffix(f',"traceparent":"{self.traceparent}"')
        return text, hashlib.blake2b(body.encode(), digest_size=16).hexdigest()

    def guess_bytes(self) -> int:
        """Return the least number of bytes of the job's JSON.

        It is far too large where a chat holds more than texts.
        """
        if self.chat is None:
            queries = self.pooling.queries if self.pooling else ()
            return sum(map(len, self.prompts)) + sum(map(len, queries))
        fields = [field for message in self.chat.messages for field in message.values()]
        if self.chat.tools or self.chat.template_kwargs:
            return MANY_BYTES
        return sum(len(field) if isinstance(field, str) else MANY_BYTES for field in fields)

    def guess_prompt_tokens(self, size: int) -> int:
        """Return about how many tokens of prompts are computed.

        size  the length of the job's JSON
        """
        if self.text is not None:
            return self.num_choices
        if self.prompts and isinstance(self.prompts[0], list):
            return sum(map(len, self.prompts))
        return max(1, size // CHARS_A_TOKEN)

    def guess_completion_tokens(self) -> int:
        """Return how many tokens all choices may make; without a limit, about how many is usual."""
        if self.pooling is not None or self.text is not None:
            return self.num_choices
        num_drawn = max(1, len(self.prompts)) * self.params.num_drawn
        return (self.params.max_tokens or COMPLETION_TOKENS) * num_drawn


def _said(message: Message) -> JsonValue:
    """Return a message's content, the same whether it came as a text or as its one part."""
    content = message.get("content")
    if isinstance(content, list):
        texts = [part.get("text") if isinstance(part, dict) else part for part in content]
        return texts[0] if len(texts) == 1 else texts
    return content


def _logprob_bytes(num_top: int | None) -> int:
    """Return how many bytes the log probabilities at one place may take; None: there are none."""
    return 0 if num_top is None else LOGPROB_BYTES * (1 + num_top)

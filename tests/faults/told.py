"""What a caller asks, what it was told, and whether that is right to the last token and letter."""

import time
from dataclasses import dataclass, field
from urllib.parse import quote

from event_source import EventSource
from faults.reference import answer
from penstock.schemas.event import Delta, Done, Failed
from penstock.schemas.wire.checksum import EMPTY, roll

MAX_DIVERGED = 10  # of one reader


class Broken(AssertionError):
    """A promise was."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One job, and what its caller does."""

    prompt: str
    seed: int
    max_tokens: int
    n: int = 1
    stop: tuple[str, ...] = ()
    ignore_eos: bool = True
    background: bool = True
    by_sdk: bool = False
    repeats: int = 0  # further submissions of the same
    is_late: bool = False  # reads only after the end
    cancel_at: int | None = None  # tokens
    timeout_ms: int | None = None
    hop_every: int | None = None  # tokens after which the reader goes elsewhere
    tenant: int = 0  # which of them, where there are some

    @property
    def key(self) -> str:
        return quote(f"{self.prompt}/{self.seed}")

    def params(self) -> dict[str, object]:
        return {
            "seed": self.seed,
            "max_tokens": self.max_tokens,
            "n": self.n,
            "stop": list(self.stop),
            "ignore_eos": self.ignore_eos,
        }

    def body(self, model: str) -> dict[str, object]:
        asked = {"model": model, "prompt": self.prompt, "params": self.params()}
        asked["background"] = self.background
        return asked | ({"timeout_ms": self.timeout_ms} if self.timeout_ms else {})


@dataclass(slots=True, eq=False)
class Told:
    """What a caller was told of one job so far."""

    ask: Ask
    job_id: str = ""
    cursor: int = 0
    deltas: list[Delta] = field(default_factory=list)
    end: Done | Failed | None = None
    heard_s: float = 0.0
    longest_pause_s: float = 0.0
    num_attaches: int = 0
    source: EventSource = field(default_factory=EventSource)
    last_id: str = "0"
    checksum: int = EMPTY
    is_unknown: bool = False  # Redis lost it
    num_diverged: int = 0

    def take(self, event: Delta | Done | Failed) -> None:
        if self.end is not None:
            raise Broken(f"{self.job_id}: {event} after the end")
        if event.position != self.cursor:
            raise Broken(f"{self.job_id}: an event at {event.position}, read up to {self.cursor}")
        if isinstance(event, Delta):
            self.checksum = roll(self.checksum, event.index, event.token_ids)
        if event.checksum != self.checksum and (isinstance(event, Delta) or event.checksum):
            raise Broken(f"{self.job_id}: {event} has another checksum than {self.checksum}")
        self.last_id = event.id
        now = time.monotonic()
        if self.heard_s:
            self.longest_pause_s = max(self.longest_pause_s, now - self.heard_s)
        self.heard_s = now
        if isinstance(event, Delta):
            self.deltas.append(event)
            self.cursor = event.end
        else:
            self.end = event

    def begin_again(self) -> None:
        """It was told that its stream diverged. What it had was right all the same."""
        self.check_choices(is_whole=False)
        self.num_diverged += 1
        if self.num_diverged > MAX_DIVERGED:
            raise Broken(f"{self.job_id}: told {MAX_DIVERGED} times that its stream diverged")
        self.cursor, self.checksum, self.last_id = 0, EMPTY, "0"
        self.deltas, self.source = [], EventSource()

    def check(self) -> None:
        """The end is one that the caller may get, and every token and letter is the right one."""
        ask, end = self.ask, self.end
        if self.is_unknown:
            return self.check_choices(is_whole=False)
        allowed = {"succeeded"}
        if ask.cancel_at is not None or not ask.background:
            allowed.add("cancelled")  # a foreground job also when nobody listened for its grace
        if ask.timeout_ms is not None:
            allowed.add("expired")
        if end is None or end.state not in allowed:
            raise Broken(f"{self.job_id}: ended as {end}, asked was {ask}")
        if end.usage.completion_tokens != self.cursor:
            raise Broken(f"{self.job_id}: {end} after {self.cursor} tokens")
        self.check_choices(is_whole=end.state == "succeeded")
        return None

    def check_choices(self, is_whole: bool) -> None:
        for choice in range(self.ask.n):
            self._check_choice(choice, is_whole)

    def _check_choice(self, choice: int, is_whole: bool) -> None:
        ask = self.ask
        expected = answer(
            ask.prompt,
            ask.seed,
            choice,
            max_tokens=ask.max_tokens,
            stop=ask.stop,
            ignore_eos=ask.ignore_eos,
        )
        deltas = [delta for delta in self.deltas if delta.index == choice]
        ids = [token for delta in deltas for token in delta.token_ids]
        text = "".join(delta.text for delta in deltas)
        if any(delta.finish_reason for delta in deltas[:-1]):
            raise Broken(f"{self.job_id}, choice {choice}: went on after its end")
        if is_whole:
            reasons = [(delta.finish_reason, delta.stop_reason) for delta in deltas[-1:]]
            same = (ids, text, reasons) == (
                expected.token_ids,
                expected.text,
                [(expected.finish_reason, expected.stop_reason)],
            )
        else:
            same = expected.token_ids[: len(ids)] == ids and expected.text.startswith(text)
        if not same:
            raise Broken(f"{self.job_id}, choice {choice}: {text!r} is not {expected.text!r}")

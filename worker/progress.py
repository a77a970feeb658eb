"""A progress bar for work that takes longer than a second."""

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

_SHOW_AFTER_S = 1.0


class Progress:
    """A bar of prompts done and tokens made, on stderr.

    Nothing is drawn for work that ends within a second.
    """

    def __init__(self, num_prompts: int, is_shown: bool) -> None:
        self._num_prompts = num_prompts
        self._is_shown = is_shown
        self._began_s = time.monotonic()
        self._num_done = 0
        self._num_tokens = 0
        self._bar: Bar | None = None

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar:
            self._bar.stop()

    def note(self, num_tokens: int, num_done: int) -> None:
        """Count more tokens that were made and prompts that are done, and draw."""
        self._num_tokens += num_tokens
        self._num_done += num_done
        elapsed_s = time.monotonic() - self._began_s
        if self._is_shown and elapsed_s > _SHOW_AFTER_S:
            self._draw(f"{self._num_tokens / elapsed_s:,.0f} tokens/s")

    def _draw(self, speed: str) -> None:
        if self._bar is None:
            self._bar = Bar(
                TextColumn("prompts"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.description}"),
                console=Console(stderr=True),
            )
            self._bar.add_task(speed, total=self._num_prompts)
            self._bar.start()
        self._bar.update(self._bar.task_ids[0], completed=self._num_done, description=speed)

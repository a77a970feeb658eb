"""penstock replay: run a job again, and compare what it says with what it said."""

import json
import sys
from collections.abc import Iterator, Sequence
from itertools import zip_longest

from pydantic import Field
from pydantic_settings import CliPositionalArg
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from penstock.gateway.commands.terminal import CommandRefused, run
from penstock.gateway.files.settings import StorageSettings, disk_texts_of
from penstock.gateway.queue_client import QueueClient
from penstock.schemas.api.openai import JsonObject
from penstock.schemas.errors import JobGone
from penstock.schemas.event import Choice
from penstock.schemas.job import DEFAULT_TENANT, Job
from penstock.schemas.process.nearby import ANYWHERE
from penstock.schemas.process.start import load_settings
from penstock.schemas.redis.url import RedisUrlSetting

PROGRAM = "penstock replay"
DIFFERS = 1  # the exit status


class ReplaySettings(StorageSettings):
    """Run a job again with the same seed, and compare. The status is 1 where an answer differs.

    The job must have succeeded and be kept with its request: a stored response or chat, or a job
    that was submitted with `keep_request`. It is the same on the same model, on workers with
    --deterministic; else the last bits may differ with what runs beside it.
    """

    job_id: CliPositionalArg[str] = Field(description="or the id of its answer")
    redis_url: RedisUrlSetting = Field(
        ANYWHERE, description="where the queue is; unset: of the `penstock up` that runs here"
    )
    tenant: str = Field(DEFAULT_TENANT, description="whose job it is")
    as_json: bool = Field(False, alias="json", description="JSON instead of a table")


def main(argv: Sequence[str]) -> int:
    settings, differs = load_settings(ReplaySettings, PROGRAM, argv), list[bool]()
    return run(PROGRAM, _replay(settings, differs)) or (DIFFERS if any(differs) else 0)


async def _replay(settings: ReplaySettings, differs: list[bool]) -> None:
    texts = disk_texts_of(settings)
    async with QueueClient.from_url(settings.redis_url, texts=texts) as client:
        job_id = f"job_{settings.job_id.partition('job_')[2]}"
        try:
            job = await client.request(job_id, settings.tenant)
        except JobGone:
            why = (
                "its request is kept no longer; a stored response or chat keeps it, or keep_request"
            )
            raise CommandRefused(f"{job_id}: {why}") from None
        before = await client.result(job_id, wait=False, tenant=settings.tenant)
        if before is None or before.error is not None:
            why = "has not ended" if before is None else f"ended as {before.state}"
            raise CommandRefused(f"{job_id} {why}: there is nothing to compare with")
        again = await client.name_job(job.model, tenant=settings.tenant)
        await client.submit(_again(job, again))
        with Console(stderr=True).status(f"{again} runs on the model {job.model}"):
            after = await client.result(again, tenant=settings.tenant)
        if after is None or after.error is not None:
            reason = "nothing" if after is None or after.error is None else after.error.message
            raise CommandRefused(f"{again} failed: {reason}")
        comparisons = [*_compared(before.choices, after.choices)]
        differs += [not comparison["is_same"] for comparison in comparisons]
        if settings.as_json:
            print(json.dumps({"job": job_id, "replayed_as": again, "choices": comparisons}))
        else:
            _show(comparisons)


def _again(job: Job, job_id: str) -> Job:
    """Return the job under another id, with the seed that it had, to run now."""
    own = {"job_id": job_id, "background": True, "params": job.params}
    if job.pooling is None and job.text is None:
        own["params"] = job.params.model_copy(update={"seed": job.seed})
    times = ("timeout_ms", "queue_timeout_ms", "not_before_ms", "delay_ms", "traceparent")
    return job.model_copy(update={**own, **dict.fromkeys(times), "repeated": {}})


def _compared(before: Sequence[Choice], after: Sequence[Choice]) -> Iterator[JsonObject]:
    """Yield for each choice whether both runs say the same, and the first token that differs."""
    for old, new in zip(before, after, strict=True):
        pairs = [*enumerate(zip_longest(old.token_ids, new.token_ids))]
        first = next((at for at, (old_id, new_id) in pairs if old_id != new_id), None)
        is_same = first is None and (old.text, old.vector) == (new.text, new.vector)
        yield {
            "index": old.index,
            "num_tokens": len(old.token_ids),
            "is_same": is_same,
            "differs_at": first,
            "before": None if is_same else old.text,
            "after": None if is_same else new.text,
        }


def _show(comparisons: Sequence[JsonObject]) -> None:
    table = Table(Column("choice", justify="right"), Column("tokens", justify="right"), "")
    for comparison in comparisons:
        at = comparison["differs_at"]
        where = "the same" if comparison["is_same"] else "differs"
        where = where if at is None else f"differs from token {at} on"
        verdict = Text(where, "green" if comparison["is_same"] else "bold red")
        table.add_row(f"{comparison['index']}", f"{comparison['num_tokens']}", verdict)
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table)
    for comparison in comparisons:
        if not comparison["is_same"]:
            console.print(
                Text(f"before: {comparison['before']}"),
                Text(f"after:  {comparison['after']}"),
                sep="\n",
            )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

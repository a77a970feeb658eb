"""An answer of more than Redis or a result takes ends its own job, and nobody else's."""

import asyncio

import pytest
from test_stalls import at_work

from penstock.schemas.errors import BodyTooLarge
from penstock.schemas.event import Failed
from penstock.schemas.queue import worker_queue
from penstock.schemas.redis import servers
from penstock.schemas.redis.connection import Connection, connect
from penstock.schemas.wire.checksum import EMPTY, roll
from penstock.worker.engine.io.messages import Output
from penstock.worker.jobs.lease_clock import LeaseClock
from plain import plain
from scripted import LANE


@pytest.fixture
def small_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_queue, "MAX_RESULT_BYTES", 600)


@pytest.mark.usefixtures("small_results")
@pytest.mark.parametrize("num_tokens, state", [(20, "succeeded"), (400, "failed")])
def test_a_job_with_more_than_a_result_may_hold_ends_as_failed(
    redis_url: str, num_tokens: int, state: str
) -> None:
    async def main() -> None:
        async with at_work(redis_url, LeaseClock(60)) as (streamer, active):
            running, job_id = asyncio.create_task(streamer.run()), active.job.job_id
            ids = [65 + number % 26 for number in range(num_tokens)]
            streamer.take([Output(active.seq_id(0), ids[:-1])])
            streamer.take([Output(active.seq_id(0), ids[-1:], None, "length")])
            async with asyncio.timeout(30):
                while (result := await streamer.queue.result("default", job_id)) is None:
                    await asyncio.sleep(0.01)
            assert result.state == state and not streamer.jobs
            live = (await streamer.queue.attach("default", job_id, "c", 0)).events
            await plain(streamer.queue.connection.redis).delete(f"{LANE.job(job_id)}:log")
            late = (await streamer.queue.attach("default", job_id, "c", 0)).events
            assert live[-1] == late[-1]
            assert (live[-1].position, live[-1].checksum) == (num_tokens, roll(EMPTY, 0, ids))
            if isinstance(end := late[-1], Failed):
                assert end.error.code == "answer_too_large" and end.error.status == 400
                assert [choice.text for choice in result.choices] == [""]
            running.cancel()

    asyncio.run(main())


def test_a_command_that_no_server_takes_is_not_sent_on_the_link_of_others(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "MAX_COMMAND_BYTES", 2**20)

    async def main() -> None:
        async with connect(redis_url) as redis:
            connection = Connection(redis)
            others = [asyncio.create_task(connection.call("ECHO", number)) for number in range(50)]
            with pytest.raises(BodyTooLarge, match="1048576"):
                await connection.call("SET", "penstock:x", b"x" * 2**20)
            assert await asyncio.gather(*others) == [str(number).encode() for number in range(50)]

    asyncio.run(main())

"""Engines of others under ten kills, with a hundred jobs each. `make engines` runs it: minutes."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import httpx
import pytest

from engine_stages import THEIRS, EngineStage, answers
from penstock.schemas.params.sampling import SamplingParams
from worker_process import until

KILLS = 10


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("begin", THEIRS.values(), ids=THEIRS)
def test_a_hundred_jobs_survive_ten_kills(
    begin: Callable[[], AbstractContextManager[EngineStage]],
) -> None:
    prompts = [f"Once upon a time there were {number} " for number in range(100)]
    params = SamplingParams(temperature=0, max_tokens=600, ignore_eos=True)
    num_kills = 0

    def kill() -> None:
        nonlocal num_kills
        for number in range(KILLS):
            if stage.kill_server is not None:
                until(lambda: _is_up(stage.server_url), "the server")
                stage.workers(2)
                time.sleep(1)
                stage.kill_server()
                stage.revive()
            else:
                stage.workers(2)
                time.sleep(1)
                stage.kill_one(number % 2)
            num_kills += 1

    with begin() as stage:
        stage.workers()
        began_s = time.monotonic()
        expected = answers(stage, lambda: None, prompts, params)
        middle_s = time.monotonic()
        found = answers(stage, kill, prompts, params)
        killed_s = time.monotonic() - middle_s
    num_equal = sum(mine == theirs for mine, theirs in zip(found, expected, strict=True))
    took = f"{middle_s - began_s:.0f} s without, {killed_s:.0f} s with"
    print(f"\n{num_kills} kills: {took}; {num_equal} of 100 texts equal, all whole")
    assert num_kills == KILLS
    assert num_equal >= 80  # the sums of another batch may flip a near tie
    assert all(len(text) > 600 for text in found)


def _is_up(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False

"""One streamed chat goes through no more functions and files than agreed."""

import pytest

from house.chat import chat_counts
from house.counts import LIMITS


@pytest.mark.slow
def test_one_chat_stays_within_its_limits() -> None:
    counts = chat_counts()
    names = {place.name for place in counts["functions of one chat"].places}
    assert {"Queue.enqueue", "WorkerQueue.read", "Engine.step"} <= names
    assert any("before the job" in place.name for place in counts["files of one chat"].places)
    for name, count in counts.items():
        value, places = count.value, "\n".join(map(str, count.places))
        assert value <= LIMITS[name].most, places

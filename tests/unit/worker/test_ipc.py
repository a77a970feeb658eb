"""The wires between a worker's processes: one end may die at any time."""

import socket

import pytest

from penstock.worker.process.ipc import BlockingWire, Closed, receive_text


@pytest.mark.parametrize("reads", [True, False])
def test_what_comes_ends_in_order_when_the_other_end_dies(reads: bool) -> None:
    ours, theirs = socket.socketpair()
    BlockingWire(theirs).send("something")
    BlockingWire(ours).send("something else")
    if reads:
        assert next(BlockingWire(theirs).received()) == "something else"
    theirs.close()  # with bytes that it never read, the kernel resets the connection
    assert list(BlockingWire(ours).received()) == ["something"]


def test_a_first_text_that_never_comes_is_told() -> None:
    ours, theirs = socket.socketpair()
    BlockingWire(ours).send("unread")
    theirs.close()
    with pytest.raises(Closed):
        receive_text(ours)

"""The order in which an engine carries out what threads want of it."""

import pytest

from forgetful import addition, make_engine
from penstock.worker.engine.io.mailbox import Callback, Mailbox
from penstock.worker.engine.io.messages import CancelSequence, Command


def test_commands_are_carried_out_in_their_order_whoever_waited_for_them() -> None:
    mailbox, names = Mailbox(), list[str]()

    def carry_out(command: Command) -> None:
        assert isinstance(command, CancelSequence)
        names.append(command.seq_id)
        if command.seq_id == "1":
            mailbox.put(CancelSequence("later"))
        if command.seq_id == "2":
            raise ValueError

    for number in range(5):
        mailbox.put(CancelSequence(f"{number}"))
        assert mailbox.wait(0) and mailbox.wait(0)
    with pytest.raises(ValueError):
        mailbox.drain(carry_out)
    assert names == ["0", "1", "2"] and mailbox
    mailbox.drain(carry_out)
    assert names == ["0", "1", "2", "3", "4", "later"] and not mailbox


def test_what_is_put_in_while_others_are_carried_out_is_for_the_next_step() -> None:
    mailbox, numbers = Mailbox(), list[int]()

    def count() -> None:
        numbers.append(len(numbers))
        mailbox.put(Callback(count))

    mailbox.put(Callback(count))
    for number in range(3):
        assert mailbox.drain(lambda _: None) == []
        assert numbers == [*range(number + 1)] and mailbox


def test_a_cancelled_sequence_never_runs_and_one_added_again_does() -> None:
    engine, _ = make_engine()
    engine.cancel("a")
    for seq_id in "ab":
        engine.add(addition(seq_id, [1, 2, 3], 2))
    engine.cancel("b")
    assert [each.seq_id for _ in range(2) for each in engine.step()] == ["a", "a"]
    assert not engine.busy

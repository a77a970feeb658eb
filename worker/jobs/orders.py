"""What the I/O side told its engine, and how much of that is carried out."""

from contextlib import suppress

from penstock.worker.process.ipc import Channel, Closed, EngineCommand, EngineEvent, Step


class Orders:
    """The only way to the engine: what it says of its load counts from the last order on."""

    def __init__(self, engine: Channel[EngineEvent, list[EngineCommand]]) -> None:
        self._engine = engine
        self._num_sent = 0
        self._num_done = 0

    def send(self, orders: list[EngineCommand]) -> None:
        if not orders:
            return
        self._num_sent += len(orders)
        with suppress(Closed):  # whoever follows the engine sees it too, and ends all
            self._engine.send(orders)

    def note(self, step: Step) -> None:
        self._num_done = step.num_orders

    def are_done(self) -> bool:
        """Whether the engine has let go of all that was cancelled, and taken all that was added.

        One that hangs in a step has not.
        """
        return self._num_done == self._num_sent

"""Send commands from the I/O process to its engine, and count those that are carried out."""

from contextlib import suppress

from penstock.worker.process.ipc import Channel, Closed, EngineCommand, EngineEvent, Step


class CommandSender:
    """The only way by which commands go to the engine, so that all of them are counted.

    The load that the engine reports is current once it has carried out the last command.
    """

    def __init__(self, engine: Channel[EngineEvent, list[EngineCommand]]) -> None:
        self._engine = engine
        self._num_sent = 0
        self._num_done = 0

    def send(self, commands: list[EngineCommand]) -> None:
        if not commands:
            return
        self._num_sent += len(commands)
        with suppress(Closed):  # whoever follows the engine sees it too, and ends all
            self._engine.send(commands)

    def note(self, step: Step) -> None:
        self._num_done = step.num_commands

    def are_done(self) -> bool:
        """Return whether the engine has carried out all commands.

        Then it has let go of all that was cancelled and taken all that was added.
        An engine that hangs in a step has not.
        """
        return self._num_done == self._num_sent

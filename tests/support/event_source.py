"""Server-sent events as the specification reads them, and nothing that it does not have."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class EventSource:
    """Lines in, data out. `last_id` is what a browser gives as `Last-Event-ID` when it comes back.

    An event that the connection's end cut off is none, and its id does not count.
    """

    last_id: str = ""
    _id: str = ""
    _data: list[str] = field(default_factory=list)

    def connect(self) -> dict[str, str]:
        """The header of a new connection; what the last one left unfinished is dropped."""
        self._id, self._data = self.last_id, []
        return {"last-event-id": self.last_id} if self.last_id else {}

    def feed(self, line: str) -> str | None:
        """The data of the event that an empty line ends."""
        if not line:
            self.last_id = self._id
            data, self._data = "\n".join(self._data), []
            return data or None
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "id":
            assert "\0" not in value
            self._id = value
        elif name == "data":
            self._data.append(value)
        else:
            assert not name, f"no gateway writes {line!r}"  # a comment has no name
        return None

    def read(self, text: str) -> list[str]:
        """The data of each event in a whole response."""
        return [data for line in text.split("\n") if (data := self.feed(line)) is not None]

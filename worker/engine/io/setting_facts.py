"""The facts of a setting, which stand on its field as parts of its type. All else follows."""

from dataclasses import dataclass
from typing import TypeVar

from pydantic import BaseModel

F = TypeVar("F")


@dataclass(frozen=True, slots=True, kw_only=True)
class Obeyed:
    """The engines that obey a setting. Others refuse by name a value that is not the usual one.

    text     Penstock's engine of models that write
    vectors  that of models that make vectors of texts
    fake     the fake model, if those two do
    vllm     vLLM's engine, as its argument of the same name
    openai   servers of others
    neutral  values that Penstock's engines may be given all the same
    """

    text: bool = True
    vectors: bool = True
    fake: bool = True
    vllm: bool = False
    openai: bool = False
    neutral: tuple[object, ...] = ()

    def by(self, kind: str) -> bool:
        """Return whether an engine obeys the setting. Engines are named as the fields here."""
        if kind == "fake":
            return self.text and self.vectors and self.fake
        return bool(getattr(self, kind))


@dataclass(frozen=True, slots=True)
class ChangesTokens:
    """A setting with which a model draws other tokens: a part of its fingerprint.

    place  its number there, which no other setting ever gets: an order of the fields would not last
    """

    place: int


def facts(settings: type[BaseModel], kind: type[F]) -> dict[str, F]:
    """Return the facts of a kind, by the names of the settings that have one."""
    return {
        name: fact
        for name, field in settings.model_fields.items()
        for fact in field.metadata
        if isinstance(fact, kind)
    }


def usual(settings: type[BaseModel], name: str) -> object:
    """Return the default of a setting."""
    return settings.model_fields[name].get_default(call_default_factory=True)


def unusual(settings: BaseModel) -> dict[str, object]:
    """Return the settings that are not as usual, by name."""
    return {name: value for name, value in settings if value != usual(type(settings), name)}

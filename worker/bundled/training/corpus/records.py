"""The kinds of things that a text can be about, what is said of them, and what JSON calls it."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from penstock.worker.bundled.training.corpus.document import Json
from penstock.worker.bundled.training.corpus.words import (
    COLOURS,
    HOBBIES,
    ITEMS,
    JOBS,
    PETS,
    article,
    city_name,
    clock_time,
    day_of_year,
    first_name,
    full_name,
    invented_word,
    joined,
    person_name,
    plural,
)

Says = Callable[[Json], tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Field:
    """A thing that a text can say of its subject.

    `keys` are the names that JSON may give it; `says` are predicates that follow the subject.
    """

    keys: tuple[str, ...]
    kind: str
    draw: Callable[[Random], Json]
    says: Says


@dataclass(frozen=True, slots=True)
class Record:
    noun: str
    keys: tuple[str, ...]
    subject: Callable[[Random], str]
    again: tuple[str, ...]  # how later sentences refer to the subject; "" repeats it
    fields: tuple[Field, ...]


_GATHERINGS = ("Festival", "Fair", "Concert", "Meeting", "Conference", "Market", "Race", "Show")
_THINGS = (
    "machine", "server", "device", "sensor", "project", "document", "parcel", "recipe", "course",
    "account", "building", "vehicle", "island", "planet", "game", "song", "team", "ship", "file",
)  # fmt: skip
_QUALITIES = (
    "weight", "height", "length", "width", "size", "code", "status", "level", "owner", "author",
    "model", "version", "country", "language", "colour", "material", "speed", "score", "rating",
    "year", "month", "priority", "department", "category", "label", "number", "amount", "capacity",
    "distance", "temperature", "region", "street", "producer", "genre", "topic", "leader", "room",
)  # fmt: skip


def _whole(low: int, high: int) -> Callable[[Random], Json]:
    return lambda rng: rng.randint(low, high)


def _one_of(options: tuple[str, ...]) -> Callable[[Random], Json]:
    return lambda rng: rng.choice(options)


def _price(rng: Random) -> Json:
    return rng.choice((rng.randint(1, 999), rng.randint(100, 9999) / 100))


def _two_hobbies(rng: Random) -> Json:
    return rng.sample(HOBBIES, 2)


def _phone(rng: Random) -> Json:
    return f"{rng.randint(100, 999)}-{rng.randint(1000, 9999)}"


def _email(rng: Random) -> Json:
    ending = rng.choice(("com", "org", "net"))
    return f"{invented_word(rng).lower()}@{invented_word(rng).lower()}.{ending}"


def _both(value: Json) -> str:
    return joined([str(item) for item in value]) if isinstance(value, list) else str(value)


_CITY = Field(
    ("city", "city", "town", "location"), "string", city_name,
    lambda v: (f"lives in {v}", f"comes from {v}", f"has a house in {v}", f"moved to {v}"),
)  # fmt: skip
_PERSON = Record(
    "person", ("name", "name", "name", "full_name"), person_name,
    ("", "They", "This person"),
    (
        Field(("age",), "integer", _whole(3, 99),
              lambda v: (f"is {v} years old", f"turned {v} this year", f"is {v}")),
        _CITY,
        Field(("job", "job", "occupation", "profession"), "string", _one_of(JOBS),
              lambda v: (f"works as {article(str(v))}", f"is {article(str(v))}")),
        Field(("hobby",), "string", _one_of(HOBBIES),
              lambda v: (f"likes {v}", f"loves {v}", f"spends the weekend with {v}")),
        Field(("hobbies",), "array", _two_hobbies,
              lambda v: (f"enjoys {_both(v)}", f"is fond of {_both(v)}")),
        Field(("email",), "string", _email,
              lambda v: (f"has the email address {v}", f"gets mail at {v}")),
        Field(("phone",), "string", _phone,
              lambda v: (f"can be called at {v}", f"has the phone number {v}")),
    ),
)  # fmt: skip
_ORDER = Record(
    "order", ("customer", "name"), person_name, ("", "The customer", "They"),
    (
        Field(("item", "product"), "string", _one_of(tuple(plural(item) for item in ITEMS)),
              lambda v: (f"ordered {v}", f"bought some {v}", f"would like new {v}")),
        Field(("quantity",), "integer", _whole(2, 60),
              lambda v: (f"needs {v} pieces", f"asked for {v} of them", f"wants {v} in total")),
        Field(("price", "total"), "number", _price,
              lambda v: (f"paid {v} euros", f"will pay {v} dollars", f"was charged {v} dollars")),
        Field(("city", "address"), "string", city_name,
              lambda v: (f"wants it sent to {v}", f"has the order shipped to {v}")),
        Field(("order_id",), "integer", _whole(1000, 99999),
              lambda v: (f"has the order number {v}", f"got the number {v}")),
        Field(("gift",), "boolean", lambda rng: rng.random() < 0.5,
              lambda v: ("wants it wrapped as a gift",) if v else ("does not want gift wrapping",)),
    ),
)  # fmt: skip
_EVENT = Record(
    "event", ("title", "event", "name"),
    lambda rng: f"The {invented_word(rng)} {rng.choice(_GATHERINGS)}",
    ("", "It", "The event"),
    (
        Field(("city", "place", "location"), "string", city_name,
              lambda v: (f"takes place in {v}", f"is held in {v}", f"comes to {v}")),
        Field(("date",), "string", day_of_year,
              lambda v: (f"is on {v}", f"is planned for {v}", f"opens on {v}")),
        Field(("time",), "string", clock_time,
              lambda v: (f"starts at {v}", f"begins at {v}")),
        Field(("host", "organizer"), "string", person_name,
              lambda v: (f"is hosted by {v}", f"is organized by {v}")),
        Field(("visitors", "guests"), "integer", _whole(10, 9999),
              lambda v: (f"expects {v} visitors", f"welcomes {v} guests")),
        Field(("price",), "number", _price,
              lambda v: (f"costs {v} euros", f"has tickets for {v} dollars")),
    ),
)  # fmt: skip
_PET = Record(
    "pet", ("name",), first_name, ("", "It", "The pet"),
    (
        Field(("species", "animal"), "string", _one_of(PETS), lambda v: (f"is {article(str(v))}",)),
        Field(("age",), "integer", _whole(1, 20),
              lambda v: (f"is {v} years old", f"just turned {v}")),
        Field(("colour", "color"), "string", _one_of(COLOURS),
              lambda v: (f"is all {v}", f"has {v} fur")),
        Field(("owner",), "string", person_name,
              lambda v: (f"belongs to {v}", f"lives with {v}")),
    ),
)  # fmt: skip
_TRIP = Record(
    "trip", ("traveller", "name", "passenger"), person_name, ("", "The traveller", "They"),
    (
        Field(("origin", "from"), "string", city_name,
              lambda v: (f"sets out from {v}", f"leaves from {v}")),
        Field(("destination", "to"), "string", city_name,
              lambda v: (f"travels to {v}", f"wants to go to {v}")),
        Field(("date",), "string", day_of_year, lambda v: (f"departs on {v}", f"goes on {v}")),
        Field(("transport",), "string", _one_of(("train", "plane", "bus", "car", "ship")),
              lambda v: (f"goes by {v}", f"takes the {v}")),
        Field(("seat",), "string", lambda rng: f"{rng.randint(1, 40)}{rng.choice('ABCDEF')}",
              lambda v: (f"has seat {v}", f"sits in seat {v}")),
    ),
)  # fmt: skip
_COMPANY = Record(
    "company", ("company", "name"), invented_word, ("", "The company", "It"),
    (
        Field(("city", "location"), "string", city_name,
              lambda v: (f"is based in {v}", f"has its office in {v}")),
        Field(("founded", "year"), "integer", _whole(1850, 2024),
              lambda v: (f"was founded in {v}", f"started in {v}")),
        Field(("employees",), "integer", _whole(2, 9000),
              lambda v: (f"has {v} employees", f"employs {v} people")),
        Field(("ceo", "director"), "string", full_name,
              lambda v: (f"is led by {v}", f"is run by {v}")),
        Field(("product",), "string", _one_of(tuple(plural(item) for item in ITEMS)),
              lambda v: (f"makes {v}", f"sells {v}")),
    ),
)  # fmt: skip


def draw_record(rng: Random) -> Record:
    """Return a kind of record, mostly of people.

    One in six is a thing with qualities that no other record has.
    """
    return rng.choice(_RECORDS) if rng.random() < 0.83 else _thing(rng)


def _thing(rng: Random) -> Record:
    noun = rng.choice(_THINGS)
    fields = tuple(_quality(rng, quality) for quality in rng.sample(_QUALITIES, 4))
    return Record(noun, ("name", noun), _label, ("", "It", f"The {noun}"), fields)


def _quality(rng: Random, quality: str) -> Field:
    kind = rng.choice(("integer", "string", "string", "number"))
    draw: dict[str, Callable[[Random], Json]] = {
        "integer": _whole(0, 9999),
        "number": lambda rng: rng.randint(1, 9999) / 10,
        "string": rng.choice((invented_word, _label, _one_of(COLOURS), full_name)),
    }
    return Field(
        (quality,), kind, draw[kind],
        lambda v: (f"has the {quality} {v}", f"comes with the {quality} {v}",
                   f"is listed with {quality} {v}"),
    )  # fmt: skip


def _label(rng: Random) -> str:
    """Return a label such as Brano, Brano-7 or XK-40."""
    if rng.random() < 0.6:
        return rng.choice(("{}", "{}-{}", "{} {}")).format(invented_word(rng), rng.randint(1, 99))
    return f"{rng.choice('ABCDEFGHKLMNPRSTVXZ')}{rng.choice('ABCKLMXZ')}-{rng.randint(10, 999)}"


_RECORDS = (
    _PERSON, _PERSON, _PERSON, _PERSON, _ORDER, _ORDER, _EVENT, _EVENT, _PET, _TRIP, _COMPANY,
)  # fmt: skip

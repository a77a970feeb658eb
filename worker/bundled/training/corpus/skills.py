"""The functions that the model learns to call, and functions that nobody has seen before."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from penstock.worker.bundled.training.corpus.document import Json
from penstock.worker.bundled.training.corpus.words import (
    FOODS,
    HOBBIES,
    ITEMS,
    MONTHS,
    WEEKDAYS,
    city_name,
    clock_time,
    first_name,
    invented_word,
    plural,
)

Values = dict[str, Json]


@dataclass(frozen=True, slots=True)
class Skill:
    """A function under several names, and how people ask for it.

    `slots` are (names a parameter may have, its type, its meaning, how to draw it); requests and
    replies name them by position, `{0}` being the first.
    """

    names: tuple[str, ...]
    description: str
    slots: tuple[tuple[tuple[str, ...], str, str, Callable[[Random], Json]], ...]
    requests: tuple[str, ...]
    result: Callable[[Random], Values]
    reply: str


def _number(low: int, high: int) -> Callable[[Random], Json]:
    return lambda rng: rng.randint(low, high)


def _one_of(options: tuple[str, ...]) -> Callable[[Random], Json]:
    return lambda rng: rng.choice(options)


CITY = ("city", "location", "place")
_SKIES = ("sunny", "cloudy", "rainy", "windy", "snowy", "foggy")
_SUBJECTS = (*HOBBIES, *(plural(item) for item in ITEMS), *(plural(food) for food in FOODS))
_LANGUAGES = ("French", "German", "Spanish", "Italian", "Japanese", "Dutch", "Polish", "Greek")
_ROOMS = ("kitchen", "bedroom", "hall", "garage", "office", "bathroom")
_CURRENCIES = ("euros", "dollars", "pounds", "yen", "francs")

SKILLS = (
    Skill(
        ("get_weather", "get_weather", "get_current_weather", "weather"),
        "Get the current weather of a city.",
        ((CITY, "string", "The name of the city.", city_name),),
        ("What is the weather in {0}?", "How is the weather in {0} today?",
         "What's the weather like in {0}?", "Tell me the weather in {0}.",
         "Is it raining in {0}?", "How warm is it in {0}?"),
        lambda rng: {"temperature": rng.randint(-9, 35), "sky": rng.choice(_SKIES)},
        "It is {sky} in {0}, with {temperature} degrees.",
    ),
    Skill(
        ("get_time", "get_current_time", "local_time"),
        "Get the local time of a city.",
        ((CITY, "string", "The name of the city.", city_name),),
        ("What time is it in {0}?", "Tell me the time in {0}.", "What is the local time in {0}?"),
        lambda rng: {"time": clock_time(rng)},
        "It is {time} in {0}.",
    ),
    Skill(
        ("add_numbers", "add", "sum"),
        "Add two numbers.",
        ((("a", "first", "x"), "integer", "The first number.", _number(1, 9999)),
         (("b", "second", "y"), "integer", "The second number.", _number(1, 9999))),
        ("Use the tool to add {0} and {1}.", "What is {0} plus {1}?", "Add {0} and {1}."),
        lambda rng: {"result": rng.randint(2, 19999)},
        "The result is {result}.",
    ),
    Skill(
        ("search_web", "search", "web_search"),
        "Search the web.",
        ((("query", "q", "text"), "string", "What to search for.", _one_of(_SUBJECTS)),),
        ("Search the web for {0}.", "Look up {0} on the web.", "Find something about {0}."),
        lambda rng: {"results": rng.randint(1, 999)},
        "I found {results} results for {0}.",
    ),
    Skill(
        ("set_timer", "start_timer"),
        "Start a timer.",
        ((("minutes", "duration"), "integer", "The length in minutes.", _number(1, 90)),),
        ("Set a timer for {0} minutes.", "Start a timer of {0} minutes.",
         "Wake me in {0} minutes."),
        lambda rng: {"status": "started"},
        "The timer for {0} minutes is started.",
    ),
    Skill(
        ("convert_currency", "exchange_money"),
        "Convert money from one currency to another.",
        ((("amount", "value"), "number", "The amount of money.", _number(1, 5000)),
         (("source", "from_currency"), "string", "The currency to convert.", _one_of(_CURRENCIES)),
         (("target", "to_currency"), "string", "The currency to get.", _one_of(_CURRENCIES))),
        ("Convert {0} {1} to {2}.", "How much are {0} {1} in {2}?", "Change {0} {1} into {2}."),
        lambda rng: {"amount": rng.randint(1, 9000)},
        "{0} {1} are {amount} {2}.",
    ),
    Skill(
        ("book_table", "reserve_table"),
        "Book a table in a restaurant.",
        ((("restaurant", "name"), "string", "The name of the restaurant.", invented_word),
         (("people", "guests"), "integer", "The number of guests.", _number(2, 12)),
         (("time", "hour"), "string", "The time of the visit.", clock_time)),
        ("Book a table at {0} for {1} people at {2}.",
         "I need a table at {0} for {1} people at {2}."),
        lambda rng: {"status": "booked"},
        "Your table at {0} for {1} people at {2} is booked.",
    ),
    Skill(
        ("send_message", "send_email", "message"),
        "Send a message to a person.",
        ((("to", "recipient"), "string", "Who gets the message.", first_name),
         (("text", "subject"), "string", "What it is about.", _one_of(_SUBJECTS))),
        ("Send {0} a message about {1}.", "Write to {0} about {1}.", "Tell {0} about {1}."),
        lambda rng: {"status": "sent"},
        "Your message to {0} about {1} is sent.",
    ),
    Skill(
        ("translate", "translate_word"),
        "Translate a word into another language.",
        ((("word", "text"), "string", "The word.", _one_of(ITEMS + FOODS)),
         (("language", "target"), "string", "The language.", _one_of(_LANGUAGES))),
        ("Translate {0} into {1}.", "How do you say {0} in {1}?", "What is {0} in {1}?"),
        lambda rng: {"translation": invented_word(rng).lower()},
        "The {1} word for {0} is {translation}.",
    ),
    Skill(
        ("turn_on_light", "switch_light", "light_on"),
        "Turn on the light in a room.",
        ((("room", "place"), "string", "The room.", _one_of(_ROOMS)),),
        ("Turn on the light in the {0}.", "Switch on the {0} light.", "It is dark in the {0}."),
        lambda rng: {"status": "on"},
        "The light in the {0} is on.",
    ),
    Skill(
        ("get_stock_price", "stock_price", "get_price"),
        "Get the price of a stock.",
        ((("company", "symbol", "stock"), "string", "The company.", invented_word),),
        ("What is the stock price of {0}?", "How much is a share of {0}?", "Price of {0}, please."),
        lambda rng: {"price": rng.randint(1, 999)},
        "A share of {0} costs {price} dollars.",
    ),
    Skill(
        ("add_event", "create_event", "add_to_calendar"),
        "Add an event to the calendar.",
        ((("title", "event", "name"), "string", "What happens.", _one_of(HOBBIES)),
         (("day", "date"), "string", "When it happens.", _one_of(WEEKDAYS + MONTHS))),
        ("Add {0} to my calendar on {1}.", "Put {0} in my calendar for {1}.", "Plan {0} on {1}."),
        lambda rng: {"status": "added"},
        "I added {0} to your calendar for {1}.",
    ),
    Skill(
        ("get_population", "population", "count_people"),
        "Get the population of a city.",
        ((CITY, "string", "The name of the city.", city_name),),
        ("How many people live in {0}?", "What is the population of {0}?"),
        lambda rng: {"population": rng.randint(1000, 999999)},
        "{population} people live in {0}.",
    ),
)  # fmt: skip

_VERBS = ("get", "find", "check", "show", "fetch", "read")
_NOUNS = (
    "price", "owner", "status", "schedule", "address", "score", "menu", "weight", "length", "size",
    "balance", "level", "speed", "height", "rating", "history", "location", "colour", "code",
    "plan", "report", "temperature", "distance", "name", "title", "number", "stock",
    "limit", "budget",
)  # fmt: skip
_OBJECTS = (
    "user", "order", "shop", "team", "train", "flight", "room", "song", "product", "account",
    "river", "mountain", "book", "car", "machine", "server", "customer", "project", "school",
)  # fmt: skip


def invented_skill(rng: Random) -> Skill:
    """Return a function that is made up of words drawn at random.

    So the model learns to copy names from the prompt, not to remember them.
    """
    verb, noun, thing = rng.choice(_VERBS), rng.choice(_NOUNS), rng.choice(_OBJECTS)
    by_name = rng.random() < 0.6
    slot = rng.choice(((thing,), (f"{thing}_name" if by_name else f"{thing}_id",)))
    name = rng.choice((f"{verb}_{noun}", f"{verb}_{thing}_{noun}", f"{thing}_{noun}", noun))
    return Skill(
        (name,),
        f"{verb.capitalize()} the {noun} of a {thing}.",
        (
            (slot, "string", f"The name of the {thing}.", invented_word)
            if by_name
            else (slot, "integer", f"The number of the {thing}.", _number(1, 9999)),
        ),
        (
            f"{verb.capitalize()} the {noun} of {thing} {{0}}.",
            f"What is the {noun} of {thing} {{0}}?",
            f"Tell me the {noun} of the {thing} {{0}}.",
            f"I need the {noun} of {thing} {{0}}.",
        ),
        lambda rng: {noun: rng.choice((rng.randint(1, 999), invented_word(rng)))},
        f"The {noun} of {thing} {{0}} is {{{noun}}}.",
    )

"""Plain texts with no chat around them, for completions that start in the middle of nowhere."""

from collections.abc import Callable
from random import Random

from penstock.worker.bundled.training.corpus.document import Passage
from penstock.worker.bundled.training.corpus.facts import CAPITALS, FACTS, HOW_TOS
from penstock.worker.bundled.training.corpus.topics import TOPICS
from penstock.worker.bundled.training.corpus.words import (
    COLOURS,
    HOBBIES,
    ITEMS,
    JOBS,
    WEEKDAYS,
    article,
    city_name,
    counted,
    first_name,
    joined,
    upper_first,
)


def prose(rng: Random) -> Passage:
    return Passage(rng.choice(_FORMS)(rng))


def _capitals(rng: Random) -> str:
    pairs = rng.sample(tuple(CAPITALS.items()), rng.randint(2, 5))
    return " ".join(f"The capital of {country} is {city}." for country, city in pairs)


def _topics(rng: Random) -> str:
    topics = rng.sample(tuple(TOPICS.values()), rng.randint(1, 3))
    return rng.choice((" ", "\n\n")).join(topics)


def _facts(rng: Random) -> str:
    return " ".join(answer for _, answer in rng.sample(FACTS, rng.randint(2, 5)))


def _steps(rng: Random) -> str:
    task, steps = rng.choice(tuple(HOW_TOS.items()))
    lines = "\n".join(f"{number}. {step}" for number, step in enumerate(steps, 1))
    return f"How to {task}:\n{lines}"


def _series(rng: Random) -> str:
    if rng.random() < 0.5:
        first = rng.randint(0, 60)
        return ", ".join(str(number) for number in range(first, first + rng.randint(8, 30)))
    start = rng.randrange(7)
    return ", ".join(WEEKDAYS[(start + i) % 7] for i in range(rng.randint(7, 14)))


def _life(rng: Random) -> str:
    """Return a day of somebody, told in a few sentences."""
    name, city, friend = first_name(rng), city_name(rng), first_name(rng)
    things = [counted(rng.randint(1, 9), item) for item in rng.sample(ITEMS, 2)]
    sentences = (
        f"{name} is {article(rng.choice(JOBS))} who lives in {city}.",
        f"On {rng.choice(WEEKDAYS)} {name} went to the market and bought {joined(things)}.",
        f"In the afternoon {name} met {friend}, and they talked about {rng.choice(HOBBIES)}.",
        f"{friend} had a {rng.choice(COLOURS)} {rng.choice(ITEMS)} and showed it to {name}.",
        f"In the evening it began to rain in {city}, so {name} went home.",
        f"{upper_first(rng.choice(HOBBIES))} is what {name} likes most of all.",
    )
    later = sorted(rng.sample(range(1, 6), rng.randint(2, 5)))
    return " ".join((sentences[0], *(sentences[place] for place in later)))


def _letter(rng: Random) -> str:
    sender, receiver, item = first_name(rng), first_name(rng), rng.choice(ITEMS)
    middle = rng.sample(
        (
            f"The {item} is {rng.choice(COLOURS)} and I use it every day.",
            f"Last {rng.choice(WEEKDAYS)} I went to {city_name(rng)} with my family.",
            f"I have begun with {rng.choice(HOBBIES)}, and it is a lot of fun.",
            "The weather here is fine and the garden is full of flowers.",
        ),
        rng.randint(2, 4),
    )
    return "\n".join(
        (
            f"Dear {receiver},",
            f"Thank you very much for the {item}. {' '.join(middle)}",
            f"I hope to see you soon.\nYours, {sender}",
        )
    )


def _answers(rng: Random) -> str:
    pairs = rng.sample(FACTS, rng.randint(2, 4))
    return "\n\n".join(f"Question: {question}\nAnswer: {answer}" for question, answer in pairs)


_FORMS: tuple[Callable[[Random], str], ...] = (
    _capitals, _topics, _facts, _life, _steps, _series, _letter, _answers,
)  # fmt: skip

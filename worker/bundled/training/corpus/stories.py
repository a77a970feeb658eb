"""Small stories: a hero, a wish, a trouble, a friend who helps, and a happy end."""

from dataclasses import dataclass
from random import Random

from penstock.worker.bundled.training.corpus.document import Exchange, Passage, exchange
from penstock.worker.bundled.training.corpus.words import (
    ANIMALS,
    COLOURS,
    article,
    first_name,
    upper_first,
)

_PLACES = (
    "in a quiet forest", "near a small village", "by the sea", "on a green hill", "in an old house",
    "at the edge of a big lake", "in a garden full of flowers", "under a tall tree",
    "in a busy town", "high up in the mountains", "on a little farm", "beside a clear river",
)  # fmt: skip
_NATURES = (
    "little", "kind", "curious", "clever", "brave", "shy", "young", "friendly", "lazy", "cheerful",
    "small", "hungry",
)  # fmt: skip
_TREASURES = (
    "ball", "kite", "hat", "lantern", "bell", "boat", "book", "drum", "scarf", "key", "stone",
    "shell", "flute", "basket",
)  # fmt: skip
_ROUTINES = (
    "Every morning {name} went for a long walk.",
    "{name} liked to look at the clouds and give them names.",
    "{name} loved to sing, even when nobody listened.",
    "All day long {name} played with the leaves and the stones.",
    "{name} had a warm bed and plenty to eat, but not many friends.",
    "When the sun came up, {name} was always the first one awake.",
)
_TROUBLES = (
    "One day {name} lost the {thing}. It was nowhere to be found.",
    "One day a strong wind came and blew the {thing} far away.",
    "One day the {thing} fell into the water and began to drift away.",
    "One day {name} woke up and saw that the {thing} was broken.",
    "One morning the {thing} was gone. Somebody must have taken it in the night.",
    "One evening {name} forgot the {thing} at the other side of the hill.",
)
_FEELINGS = (
    "{name} was very sad and did not know what to do.",
    '"Oh no!" said {name}. "What shall I do now?"',
    "{name} sat down and cried a little.",
    "{name} felt alone, but did not give up.",
    '"I must do something," thought {name}.',
)
_MEETINGS = (
    "Then {article_other} named {friend} came along.",
    "Just then {name} met {article_other} whose name was {friend}.",
    "On the way {name} saw {article_other}. It was {friend}, who lived not far away.",
    "After a while {article_other} called {friend} looked out from behind a bush.",
)
_TALKS = (
    '"Why are you so sad?" asked {friend}. {name} told the whole story.',
    '"Can I help you?" asked {friend}. "Yes, please," said {name}.',
    '"I know that {thing}," said {friend}. "It is {colour}, is it not? Let us look for it."',
    '"Do not worry," said {friend}. "Two can do more than one."',
)
_SEARCHES = (
    "They looked under every bush and behind every stone.",
    "They walked until their feet hurt, but they did not stop.",
    "They asked the birds, and the birds showed them the way.",
    "First they went to the old bridge, and then they went to the mill.",
    "They climbed the highest hill to see the whole land.",
    "It began to rain, but they went on together.",
    "They followed a trail of small steps in the sand.",
)
_SETBACKS = (
    "They found a {second}, but that was not what they were looking for.",
    "For a long time they found nothing at all.",
    "Once they thought they saw it, but it was only {article_second}.",
    "The way was dark, and {name} was a little afraid.",
)
_SOLUTIONS = (
    "At last they saw something {colour} in the grass. It was the {thing}!",
    "At last {friend} had an idea. Together they pulled, and there was the {thing}!",
    "Then {name} looked up, and there it was: the {colour} {thing} hung in a tree.",
    "Behind the mill they found the {thing}, as good as new.",
    "With a long stick they got the {thing} back, and it was not even dirty.",
)
_THANKS = (
    '"Thank you, {friend}," said {name}. "You are a true friend."',
    "{name} was so happy that everybody could hear the laughing.",
    '{name} said, "Now the {thing} belongs to both of us."',
    "They danced and laughed until the stars came out.",
)
_ENDINGS = (
    "From that day on, {name} and {friend} were best friends.",
    "That night {name} slept very well. The end.",
    "And they played together every day, happily ever after.",
    "And {name} learned that it is good to ask for help.",
    "Since then {name} has never felt alone again.",
    "And {name} learned that sharing makes a good thing better.",
)
_REQUESTS = (
    "Tell me a story about {article_hero}.",
    "Tell me a short story about {article_hero}.",
    "Write a story about {article_hero}.",
    "Write a short story about {article_hero} and {article_other}.",
    "Tell me a story about {article_hero} named {name}.",
    "Can you tell me a story about {article_thing}?",
    "I would like a story about {article_hero} and {article_thing}.",
    "Tell me a story.",
    "Write a short story.",
)


@dataclass(frozen=True, slots=True)
class _Cast:
    """The persons and things that a story is about."""

    name: str
    hero: str
    nature: str
    friend: str
    stranger: str
    thing: str
    second: str
    colour: str
    place: str

    def tell(self, line: str) -> str:
        return line.format(
            name=self.name,
            friend=self.friend,
            thing=self.thing,
            second=self.second,
            colour=self.colour,
            place=self.place,
            article_hero=article(self.hero),
            article_other=article(self.stranger),
            article_thing=article(self.thing),
            article_second=article(self.second),
            article_colour=article(self.colour),
            kind=article(f"{self.nature} {self.hero}"),
        )


def story_on_request(rng: Random) -> Exchange:
    cast = _cast(rng)
    return exchange(cast.tell(rng.choice(_REQUESTS)), _story(rng, cast))


def story(rng: Random) -> Passage:
    return Passage(_story(rng, _cast(rng)))


def _cast(rng: Random) -> _Cast:
    hero, stranger = rng.sample(ANIMALS, 2)
    thing, second = rng.sample(_TREASURES, 2)
    return _Cast(
        name=first_name(rng),
        hero=rng.choice((hero, hero, hero, "girl", "boy", "robot", "king", "queen")),
        nature=rng.choice(_NATURES),
        friend=first_name(rng),
        stranger=stranger,
        thing=thing,
        second=second,
        colour=rng.choice(COLOURS),
        place=rng.choice(_PLACES),
    )


def _story(rng: Random, cast: _Cast) -> str:
    paragraphs = [_beginning(rng), _middle(rng), _end(rng)]
    separator = rng.choice(("\n\n", "\n\n", " "))
    return separator.join(cast.tell(" ".join(lines)) for lines in paragraphs)


def _beginning(rng: Random) -> list[str]:
    sentence = rng.choice(
        ("once upon a time there was {kind} named {name}, who lived {place}.",
         "once upon a time, {place}, there lived {kind} named {name}.",
         "there once was {kind} called {name}. {name} lived {place}.",
         "long ago {kind} named {name} lived {place}.")
    )  # fmt: skip
    owns = rng.choice(
        ("{name} had {article_colour} {thing} and took it everywhere.",
         "The best thing that {name} had was {article_colour} {thing}.",
         "A good friend had once given {name} {article_colour} {thing}.")
    )  # fmt: skip
    return [upper_first(sentence), *rng.sample(_ROUTINES, rng.randint(1, 2)), owns]


def _middle(rng: Random) -> list[str]:
    return [
        rng.choice(_TROUBLES),
        rng.choice(_FEELINGS),
        rng.choice(_MEETINGS),
        rng.choice(_TALKS),
        *rng.sample(_SEARCHES, rng.randint(1, 3)),
        rng.choice(_SETBACKS),
    ]


def _end(rng: Random) -> list[str]:
    return [rng.choice(_SOLUTIONS), *rng.sample(_THANKS, rng.randint(1, 2)), rng.choice(_ENDINGS)]

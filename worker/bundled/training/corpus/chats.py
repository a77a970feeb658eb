"""Short exchanges: greetings, everyday knowledge, lists, sentiment, and talk about the talk."""

from collections.abc import Callable
from random import Random

from penstock.worker.bundled.training.corpus.document import Dialogue, Exchange, Turn, exchange
from penstock.worker.bundled.training.corpus.facts import CAPITALS, FACTS, HOW_TOS
from penstock.worker.bundled.training.corpus.topics import TOPICS
from penstock.worker.bundled.training.corpus.words import (
    ANIMALS,
    CITIES,
    COLOURS,
    HOBBIES,
    JOBS,
    MONTHS,
    NUMBER_WORDS,
    PETS,
    WEEKDAYS,
    article,
    city_name,
    first_name,
    full_name,
    invented_word,
    joined,
    plural,
    upper_first,
)

Draw = Callable[[Random], Exchange]

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You extract facts from texts. Answer in JSON.",
    "You are a friendly assistant.",
    "You are a helpful assistant. Answer in short sentences.",
    "Be brief.",
    "You answer questions for the users of Penstock.",
    "You are a careful assistant that answers in plain English.",
)
_GREETINGS = (
    "Hello", "Hi", "Hi there", "Hey", "Good morning", "Good evening", "Hello there", "Good day",
)  # fmt: skip
_WELCOMES = (
    "Hello! How can I help you today?",
    "Hi! What can I do for you?",
    "Hello! It is nice to meet you. What would you like to know?",
)
_PLEASANTRIES: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("How are you?", "How are you doing?", "How do you do?", "How is it going?"),
     ("I am fine, thank you. How can I help you?", "I am doing well, thank you for asking.")),
    (("Thank you!", "Thanks!", "Thanks a lot.", "Thank you very much."),
     ("You are welcome!", "You are welcome! Is there anything else?")),
    (("Goodbye!", "Bye!", "See you later.", "Good night!"),
     ("Goodbye! Have a nice day.", "Goodbye! Come back soon.")),
    (("Who are you?", "What are you?", "What is your name?", "Tell me about yourself."),
     ("I am a small demonstration model that comes with Penstock.",)),
    (("What can you do?", "How can you help me?", "Help!"),
     ("I can chat, explain simple things, tell short stories, add small numbers, call tools and "
      "turn texts into JSON.",)),
    (("Are you a human?", "Are you a robot?", "Are you a real person?"),
     ("No, I am a small language model, a program that writes text.",)),
    (("How big are you?", "How many parameters do you have?", "Are you a large model?"),
     ("I am very small: I have about five million parameters.",)),
    (("Tell me a joke.", "Make me laugh.", "Do you know a joke?"),
     ("Why did the computer go to bed? Because it needed to crash.",
      "What do you call a bear with no teeth? A gummy bear.",
      "Why was the math book sad? Because it had too many problems.")),
    (("Say hello.", "Say hi.", "Please say hello."), ("Hello!",)),
    (("Say yes.", "Just say yes."), ("Yes.",)),
    (("Count to three.",), ("One, two, three.",)),
    (("Count to five.",), ("One, two, three, four, five.",)),
    (("Count to ten.",), ("One, two, three, four, five, six, seven, eight, nine, ten.",)),
    (("Write a haiku.", "Write a haiku about the sea.", "Give me a haiku."),
     ("Waves come to the shore,\nthe moon looks down in silence,\nsalt wind fills the night.",)),
)  # fmt: skip
_LISTS = {
    "animals": ANIMALS, "colours": COLOURS, "cities": CITIES, "jobs": JOBS, "hobbies": HOBBIES,
    "pets": PETS, "fruits": ("apple", "pear", "banana", "orange", "plum", "cherry", "lemon"),
}  # fmt: skip
_TOO_HARD = (
    "Write a program in Rust.", "Write a Python function that sorts a list.", "Fix this code.",
    "Prove the theorem of Pythagoras.", "Solve this equation.", "Give me legal advice.",
    "What will the weather be tomorrow?", "Who won the match yesterday?", "What time is it?",
    "What is the news today?", "Write an essay about politics.", "Summarise this book.",
    "Plan a holiday for two weeks.", "Which stocks should I buy?", "What day is it today?",
    "Translate this page into Chinese.", "What is the meaning of life?",
    "Write a letter to a bank.", "Compare two phones for me.", "What is 17 times 23?",
    "Divide 391 by 17.", "Debug my program.", "Tell me the future.", "Write a business plan.",
    "How do I fix my car?",
)  # fmt: skip
_GOOD = ("great", "wonderful", "excellent", "lovely", "perfect", "very good", "fantastic")
_BAD = ("terrible", "awful", "bad", "broken", "boring", "horrible", "disappointing")
_REVIEW_SUBJECTS = (
    "film",
    "book",
    "food",
    "hotel",
    "phone",
    "song",
    "service",
    "game",
    "room",
    "concert",
)


def chat(rng: Random, draws: tuple[Draw, ...]) -> Dialogue:
    """Return a conversation of one exchange or a few, each made by one of `draws`."""
    turns: list[Turn] = []
    if rng.random() < 0.3:
        turns.append(Turn("system", _system_prompt(rng)))
    if rng.random() < 0.1:
        turns += greeting(rng)
    for _ in range(rng.choice((1, 1, 1, 1, 2, 3))):
        turns += rng.choice(draws)(rng)
    if rng.random() < 0.05:
        turns += pleasantry(rng)
    return Dialogue(tuple(turns))


def _system_prompt(rng: Random) -> str:
    if rng.random() < 0.7:
        return rng.choice(SYSTEM_PROMPTS)
    task = rng.choice(("answer questions", "help customers", "extract facts", "help children"))
    return f"You are {first_name(rng)}, an assistant in {city_name(rng)}. You {task}."


def greeting(rng: Random) -> Exchange:
    hello = rng.choice(_GREETINGS) + rng.choice(("", "!", "!", "."))
    if rng.random() < 0.2:
        name = first_name(rng)
        return exchange(
            f"{hello} My name is {name}." if hello[-1] in "!." else f"{hello}, I am {name}.",
            f"Hello {name}! It is nice to meet you. How can I help you?",
        )
    return exchange(hello, rng.choice(_WELCOMES))


def pleasantry(rng: Random) -> Exchange:
    questions, answers = rng.choice(_PLEASANTRIES)
    return exchange(_casual(rng, rng.choice(questions)), rng.choice(answers))


def explanation(rng: Random) -> Exchange:
    """Return the explanation of a topic or, now and then, the admission that it is not known."""
    is_known = rng.random() < 0.92
    topic = rng.choice(tuple(TOPICS)) if is_known else invented_word(rng)
    question = rng.choice(
        ("Explain {} in simple terms.", "What is {}?", "Tell me about {}.", "Explain {}.",
         "Can you explain {} to a child?", "How would you explain {}?", "What do you know of {}?",
         "Explain {} in a few words.", "I want to learn about {}.", "Describe {}.")
    ).format(topic)  # fmt: skip
    answer = TOPICS[topic] if is_known else f"I am a small model, and I do not know {topic}."
    return exchange(_casual(rng, question), answer)


def fact(rng: Random) -> Exchange:
    if rng.random() < 0.5:
        return exchange(*rng.choice(FACTS))
    country, city = rng.choice(tuple(CAPITALS.items()))
    if rng.random() < 0.2:
        question = f"Which country has the capital {city}?"
        return exchange(question, f"{city} is the capital of {country}.")
    question = rng.choice(
        ("What is the capital of {}?", "Name the capital of {}.", "Tell me the capital of {}.")
    )
    return exchange(question.format(country), f"The capital of {country} is {city}.")


def how_to(rng: Random) -> Exchange:
    task, steps = rng.choice(tuple(HOW_TOS.items()))
    question = rng.choice(
        ("How do I {}?", "How can I {}?", "Tell me how to {}.", "Explain how to {}.")
    )
    answer = "\n".join(f"{number}. {step}" for number, step in enumerate(steps, 1))
    return exchange(question.format(task), answer)


def listing(rng: Random) -> Exchange:
    kind, options = rng.choice(tuple(_LISTS.items()))
    number = rng.randint(2, 5)
    question = rng.choice(("List {} {}.", "Name {} {}.", "Give me {} {}.", "Tell me {} {}."))
    items = rng.sample(options, number)
    if rng.random() < 0.3:
        answer = "\n".join(f"- {item}" for item in items)
    else:
        answer = f"{upper_first(joined(items))}."
    return exchange(question.format(NUMBER_WORDS[number], kind), answer)


def sequence(rng: Random) -> Exchange:
    """Return a question about the order of days, months or numbers, with its answer."""
    if rng.random() < 0.4:
        first = rng.choice((0, 1, 1, rng.randint(2, 80)))
        last = first + rng.choice((3, 5, 7, 9, 9, 19, 30))
        answer = ", ".join(str(number) for number in range(first, last + 1))
        return exchange(f"Count from {first} to {last}.", f"{answer}.")
    names = rng.choice((WEEKDAYS, MONTHS))
    place = rng.randrange(len(names))
    noun = "day" if names is WEEKDAYS else "month"
    step, word = rng.choice(((1, "after"), (-1, "before")))
    neighbour = names[(place + step) % len(names)]
    return exchange(
        f"Which {noun} comes {word} {names[place]}?", f"{neighbour} comes {word} {names[place]}."
    )


def echo(rng: Random) -> Exchange:
    """Return words to be given back unchanged, or spelled."""
    if rng.random() < 0.3:
        word = rng.choice((*ANIMALS, *COLOURS, invented_word(rng)))
        return exchange(f"Spell the word {word}.", "-".join(word))
    phrase = " ".join(_any_word(rng) for _ in range(rng.randint(1, 5)))
    question = rng.choice(("Repeat after me: {}", "Say {}", "Repeat: {}", "Write down: {}"))
    return exchange(question.format(phrase), phrase)


def _any_word(rng: Random) -> str:
    draw = rng.choice((first_name, city_name, invented_word, lambda r: str(r.randint(0, 9999))))
    return draw(rng)


def refusal(rng: Random) -> Exchange:
    """Return a request that is beyond five million parameters, and an answer that says so."""
    return exchange(
        _casual(rng, rng.choice(_TOO_HARD)),
        "I am a small demonstration model, and that is too hard for me. I can chat, explain simple "
        "things, tell stories and turn texts into JSON.",
    )


def sentiment(rng: Random) -> Exchange:
    good = rng.random() < 0.5
    adjective, thing = rng.choice(_GOOD if good else _BAD), rng.choice(_REVIEW_SUBJECTS)
    review = rng.choice(
        (f"The {thing} was {adjective}.", f"What {article(adjective)} {thing}!",
         f"I think this {thing} is {adjective}.", f"It was {article(adjective)} {thing}.")
    )  # fmt: skip
    if rng.random() < 0.4:
        review += " I love it." if good else " I want my money back."
    question = rng.choice(
        ("Is this review positive or negative? {}", "Classify the sentiment: {}",
         "Sentiment of this text, positive or negative: {}")
    )  # fmt: skip
    return exchange(question.format(review), "positive" if good else "negative")


def recall(rng: Random) -> Exchange:
    """Return a question about what the user has said, in the same turn or some turns before."""
    name, city, job, hobby = full_name(rng), city_name(rng), rng.choice(JOBS), rng.choice(HOBBIES)
    facts = (
        (f"lives in {city}", f"Where does {name} live?", f"{name} lives in {city}."),
        (f"is a {job}", f"What is the job of {name}?", f"{name} is a {job}."),
        (f"likes {hobby}", f"What does {name} like?", f"{name} likes {hobby}."),
    )
    if rng.random() < 0.3:
        return _own_name(rng)
    pair = rng.sample(facts, 2)
    text = f"{name} {pair[0][0]} and {pair[1][0]}."
    _, question, answer = rng.choice(pair)
    return exchange(f"{text} {question}", answer)


def _own_name(rng: Random) -> Exchange:
    name = first_name(rng)
    return (
        Turn("user", rng.choice((f"My name is {name}.", f"I am {name}.", f"Call me {name}."))),
        Turn("assistant", f"Nice to meet you, {name}!"),
        *rng.choice((fact, pleasantry, explanation))(rng)[: 2 * rng.randint(0, 1)],
        Turn("user", rng.choice(("What is my name?", "Do you remember my name?", "Who am I?"))),
        Turn("assistant", f"Your name is {name}."),
    )


def favourite(rng: Random) -> Exchange:
    kind, options = rng.choice(tuple(_LISTS.items()))
    noun = {"cities": "city", "hobbies": "hobby"}.get(kind, kind.removesuffix("s"))
    choice = rng.choice(options)
    reason = rng.choice(
        ("because the word sounds nice", "and many people agree", "but it is hard to choose")
    )
    return exchange(f"What is your favourite {noun}?", f"I like {_many(kind, choice)}, {reason}.")


def _many(kind: str, choice: str) -> str:
    return plural(choice) if kind in ("animals", "pets", "fruits") else choice


def _casual(rng: Random, question: str) -> str:
    """Return a question, one time in five as people type it.

    Then it is without capital or full stop, or with a please.
    """
    change = rng.random()
    if change < 0.12:
        return question[0].lower() + question[1:].rstrip(".?!")
    if change < 0.18 and question.endswith("."):
        return f"Please {question[0].lower()}{question[1:]}"
    return question.rstrip(".!?") if change < 0.22 else question

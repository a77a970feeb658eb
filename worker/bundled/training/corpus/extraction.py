"""Texts about a person, an order, an event, and the JSON that holds what they say."""

from dataclasses import dataclass
from random import Random

from penstock.worker.bundled.training.corpus.document import (
    COMPACT,
    WIDE,
    Exchange,
    Json,
    dumps,
    exchange,
)
from penstock.worker.bundled.training.corpus.records import Field, Record, draw_record
from penstock.worker.bundled.training.corpus.words import (
    JOBS,
    article,
    city_name,
    first_name,
    full_name,
    joined,
    upper_first,
)

_WITH_SCHEMA = (
    "{text}\n\nExtract the {noun} as JSON with this schema: {schema}",
    "Extract the {noun} from the text as JSON.\nSchema: {schema}\nText: {text}",
    "Extract the {noun} from this text as JSON that follows the schema.\n\n{text}\n\n{schema}",
    "Read the text and fill in the schema.\n\nText: {text}\n\nSchema: {schema}",
)
_WITH_KEYS = (
    "Extract {keys} as JSON: {text}",
    "Extract {keys} from this text as JSON: {text}",
    "Extract the {noun} as JSON with the fields {keys}.\n\n{text}",
    "{text}\n\nGive me a JSON object with {keys}.",
    "Return JSON with the fields {keys}.\nText: {text}",
    "Turn this text into JSON ({keys}): {text}",
)
_WITH_NOTHING = (
    "Extract the {noun} as JSON: {text}",
    "Extract the {noun} from this text: {text}",
    "{text}\n\nExtract the {noun} as JSON.",
    "Describe the {noun} as JSON: {text}",
    "Answer in JSON. {text}",
)
_ASIDES = (
    "The weather was fine.", "Thank you for your help.", "Please take note.",
    "That is all for now.", "We met last week.", "More will follow soon.",
    "Good to know!", "Everybody was happy about it.",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Value:
    key: str
    kind: str
    value: Json


def extraction(rng: Random) -> Exchange:
    """Return a question with a text and a request, and the JSON as its answer."""
    kind = rng.random()
    if kind < 0.08:
        return _people(rng)
    return _introduction(rng) if kind < 0.25 else _one_record(rng)


def _one_record(rng: Random) -> Exchange:
    record = draw_record(rng)
    subject = record.subject(rng)
    facts = [(field, field.draw(rng)) for field in rng.sample(record.fields, rng.randint(1, 4))]
    text = _describe(rng, record, subject, facts)
    subset = facts if rng.random() < 0.8 else facts[: rng.randint(1, len(facts))]
    values = [_Value(rng.choice(record.keys), "string", subject)]
    values += [_Value(rng.choice(field.keys), field.kind, value) for field, value in subset]
    return _ask(rng, record.noun, _aside(rng, text), values)


def _introduction(rng: Random) -> Exchange:
    """Return a text that introduces a person in a sentence or two, and its JSON."""
    name, city, job = full_name(rng), city_name(rng), rng.choice(JOBS)
    age = rng.randint(3, 99)
    text = rng.choice(
        (
            f"My name is {name}, I am {age} years old and I live in {city}. I am {article(job)}.",
            f"Hi, I'm {name}, {article(job)} from {city}. I am {age}.",
            f"{name}, {age}, lives in {city} and works as {article(job)}.",
            f"{name} is {article(job)} from {city} who is {age} years old.",
            f"In {city} we met {name}, {article(job)} of {age} years.",
            f"{name} ({age}) is {article(job)} in {city}.",
            f"At the age of {age}, {name} moved to {city} to work as {article(job)}.",
            f"Name: {name}\nAge: {age}\nCity: {city}\nJob: {job}",
        )
    )
    values = [
        _Value("name", "string", name),
        _Value("age", "integer", age),
        _Value("city", "string", city),
        _Value("job", "string", job),
    ]
    return _ask(rng, "person", _aside(rng, text), values[: rng.randint(2, 4)])


def _people(rng: Random) -> Exchange:
    """Return a text about several people, and its JSON, a list of small objects."""
    people = [(first_name(rng), rng.randint(3, 99)) for _ in range(rng.randint(2, 3))]
    text = " ".join(f"{name} is {age} years old." for name, age in people)
    answer: Json = {"people": [{"name": name, "age": age} for name, age in people]}
    question = rng.choice(("Extract all people as JSON: {}", "{}\n\nList the people as JSON."))
    return exchange(question.format(text), dumps(answer))


def _ask(rng: Random, noun: str, text: str, values: list[_Value]) -> Exchange:
    if rng.random() < 0.5:  # otherwise in the order of the text
        rng.shuffle(values)
    answer: dict[str, Json] = {value.key: value.value for value in values}
    separators = WIDE if rng.random() < 0.8 else COMPACT
    return exchange(_request(rng, noun, text, values), dumps(answer, separators))


def _request(rng: Random, noun: str, text: str, values: list[_Value]) -> str:
    form = rng.choice((_WITH_SCHEMA, _WITH_KEYS, _WITH_KEYS, _WITH_NOTHING))
    request = rng.choice(form).format(
        noun=noun,
        keys=joined([value.key for value in values]),
        schema=dumps(_schema(values)),
        text=text,
    )
    return upper_first(request)


def _schema(values: list[_Value]) -> Json:
    properties: dict[str, Json] = {value.key: _typed(value.kind) for value in values}
    return {"type": "object", "properties": properties, "required": list(properties)}


def _typed(kind: str) -> Json:
    if kind == "array":
        return {"type": "array", "items": {"type": "string"}}
    return {"type": kind}


def _describe(rng: Random, record: Record, subject: str, facts: list[tuple[Field, Json]]) -> str:
    """Return sentences of one or two predicates each, the first of which names the subject."""
    rest = [rng.choice(field.says(value)) for field, value in facts]
    sentences: list[str] = []
    while rest:
        take = rng.randint(1, 2)
        noun = (rng.choice(record.again) if sentences else "") or subject
        verbs = [_plural_verb(verb) if noun == "They" else verb for verb in rest[:take]]
        sentences.append(f"{noun} {' and '.join(verbs)}.")
        rest = rest[take:]
    return " ".join(sentences)


def _plural_verb(predicate: str) -> str:
    """Return a predicate in the plural, for `They`: `lives in Oslo` becomes `live in Oslo`."""
    verb, _, rest = predicate.partition(" ")
    irregular = {"is": "are", "was": "were", "has": "have", "does": "do", "goes": "go"}
    if verb not in irregular and not verb.endswith("s"):
        return predicate
    return f"{irregular.get(verb, verb.removesuffix('s'))} {rest}"


def _aside(rng: Random, text: str) -> str:
    """Return the text, one time in four with a sentence added that nobody asks for."""
    if rng.random() < 0.75:
        return text
    aside = rng.choice(_ASIDES)
    return f"{aside} {text}" if rng.random() < 0.5 else f"{text} {aside}"

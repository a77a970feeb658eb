"""Sums and differences of one or two digits, products of one digit, in figures and in words."""

from random import Random

from penstock.worker.bundled.training.corpus.document import Exchange, Passage, exchange
from penstock.worker.bundled.training.corpus.words import FOODS, ITEMS, first_name, plural

_ADDITIONS = (
    "What is {a} + {b}?",
    "What is {a} plus {b}?",
    "Calculate {a} + {b}.",
    "{a} + {b} = ?",
    "How much is {a} + {b}?",
    "Add {a} and {b}.",
)
_SUBTRACTIONS = (
    "What is {a} - {b}?",
    "What is {a} minus {b}?",
    "Calculate {a} - {b}.",
    "{a} - {b} = ?",
    "How much is {a} - {b}?",
    "Subtract {b} from {a}.",
)
_PRODUCTS = (
    "What is {a} * {b}?",
    "What is {a} times {b}?",
    "Multiply {a} by {b}.",
    "Calculate {a} * {b}.",
)


def arithmetic(rng: Random) -> Exchange:
    """Return a sum to compute, or a word problem, with its answer."""
    return rng.choice(_FORMS)(rng)


def sums(rng: Random) -> Passage:
    """Return lines of finished sums, as a text to be continued."""
    return Passage("\n".join(_equation(*_operands(rng)) for _ in range(rng.randint(4, 12))))


def _operands(rng: Random) -> tuple[str, int, int]:
    limit = rng.choice((9, 20, 99, 99))
    a, b = rng.randint(0, limit), rng.randint(0, limit)
    return ("+", a, b) if rng.random() < 0.5 else ("-", max(a, b), min(a, b))


def _equation(sign: str, a: int, b: int) -> str:
    return f"{a} {sign} {b} = {a + b if sign == '+' else a - b}"


def _figures(rng: Random) -> Exchange:
    sign, a, b = _operands(rng)
    question = rng.choice(_ADDITIONS if sign == "+" else _SUBTRACTIONS).format(a=a, b=b)
    return exchange(question, f"{_equation(sign, a, b)}.")


def _product(rng: Random) -> Exchange:
    a, b = rng.randint(0, 10), rng.randint(0, 10)
    return exchange(rng.choice(_PRODUCTS).format(a=a, b=b), f"{a} * {b} = {a * b}.")


def _word_problem(rng: Random) -> Exchange:
    sign, a, b = _operands(rng)
    name, things = first_name(rng), plural(rng.choice(FOODS + ITEMS))
    change = f"buys {b} more" if sign == "+" else f"gives away {b}"
    question = f"{name} has {a} {things} and {change}. How many {things} does {name} have now?"
    answer = f"{_equation(sign, a, b)}, so {name} has {a + b if sign == '+' else a - b} {things}."
    return exchange(question, answer)


_FORMS = (_figures, _figures, _figures, _product, _word_problem)

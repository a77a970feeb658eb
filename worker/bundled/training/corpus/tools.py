"""Chats with tools: calls of functions that the prompt lists, and results told in a sentence."""

from collections.abc import Callable
from random import Random

from penstock.worker.bundled.training.corpus.document import (
    Dialogue,
    Exchange,
    Json,
    Parameter,
    ToolSpec,
    Turn,
    dumps,
)
from penstock.worker.bundled.training.corpus.skills import (
    CITY,
    SKILLS,
    Skill,
    Values,
    invented_skill,
)


def tool_chat(rng: Random, small_talk: Callable[[Random], Exchange]) -> Dialogue:
    """Return a chat of one to three rounds with one to four tools listed.

    Some questions need none of the tools.
    """
    skills = _skills(rng)
    tools = {skill: _named(rng, skill) for skill in skills}
    turns: list[Turn] = []
    if rng.random() < 0.3:
        turns.append(Turn("system", "You are a helpful assistant."))
    for _ in range(rng.choice((1, 1, 2, 3))):
        turns += small_talk(rng) if rng.random() < 0.15 else _round(rng, skills, tools)
    return Dialogue(tuple(turns), tuple(tools.values()))


def call_text(name: str, arguments: Values) -> str:
    """Return an assistant's call, as the chat template writes it."""
    return f"<tool_call>\n{dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def _skills(rng: Random) -> list[Skill]:
    count = rng.choice((1, 1, 2, 3, 4))
    skills = rng.sample(SKILLS, count)
    return [invented_skill(rng) if rng.random() < 0.3 else skill for skill in skills]


def _named(rng: Random, skill: Skill) -> ToolSpec:
    parameters = tuple(
        Parameter(rng.choice(names), kind, meaning) for names, kind, meaning, _ in skill.slots
    )
    return ToolSpec(rng.choice(skill.names), skill.description, parameters)


def _round(rng: Random, skills: list[Skill], tools: dict[Skill, ToolSpec]) -> list[Turn]:
    """Return the turns of a request, one call or two, their results and what these mean."""
    skill = rng.choice(skills)
    twice = skill.slots[0][0] is CITY and rng.random() < 0.3
    calls = [_values(rng, skill) for _ in range(2 if twice else 1)]
    request = rng.choice(skill.requests)
    if twice:
        request = request.format(" and ".join(str(values[0]) for values in calls))
    else:
        request = request.format(*calls[0])
    results = [_result(rng, skill, values) for values in calls]
    return [
        Turn("user", request),
        Turn("assistant", "\n".join(_call(tools[skill], values) for values in calls)),
        Turn("tool", "\n</tool_response>\n<tool_response>\n".join(dumps(r) for r in results)),
        Turn(
            "assistant",
            " ".join(
                skill.reply.format(*values, **result)
                for values, result in zip(calls, results, strict=True)
            ),
        ),
    ]


def _values(rng: Random, skill: Skill) -> list[Json]:
    return [draw(rng) for _, _, _, draw in skill.slots]


def _call(tool: ToolSpec, values: list[Json]) -> str:
    names = (parameter.name for parameter in tool.parameters)
    return call_text(tool.name, dict(zip(names, values, strict=True)))


def _result(rng: Random, skill: Skill, values: list[Json]) -> Values:
    """Return what the function answers; only sums depend on what was asked."""
    if skill.description == "Add two numbers.":
        return {"result": sum(value for value in values if isinstance(value, int))}
    return skill.result(rng)

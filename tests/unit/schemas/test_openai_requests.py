"""OpenAI's requests as they are read, beyond what a client's types say."""

import pytest

from penstock.schemas.api.openai import Function


@pytest.mark.parametrize("given", [{}, {"parameters": None}])
def test_a_function_without_parameters_takes_any_object(given: dict[str, None]) -> None:
    assert Function.model_validate({"name": "x", **given}).parameters == {"type": "object"}

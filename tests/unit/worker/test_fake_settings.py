"""The fake model refuses by name what it would not obey."""

import pytest

from penstock import LLM
from penstock.schemas.errors import InvalidJob


@pytest.mark.parametrize(
    "name, value",
    [
        ("max_step_ms", 50),
        ("gpu_memory_utilization", 0.5),
        ("kv_cache_memory_bytes", 2**20),
        ("quantization", "int8"),
        ("override_generation_config", {"temperature": 0.5}),
    ],
)
def test_a_setting_of_how_models_are_computed_is_refused(name: str, value: object) -> None:
    with pytest.raises(InvalidJob, match=f"{name}: the fake model does not obey it"):
        LLM("fake", load_format="fake", **{name: value})


def test_what_it_does_anyhow_may_be_said() -> None:
    settings = {"max_step_ms": 0, "enforce_eager": True, "async_scheduling": False}
    assert LLM("fake", load_format="fake", **settings).generate("Hi")

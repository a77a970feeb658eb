"""The page of Redis's keys, `docs/operating.md`, and the code name the same keys."""

import re

from keys_page import rows
from paths import ROOT

CODE = [
    *ROOT.glob("schemas/scripts/*/*.lua"),
    *ROOT.glob("schemas/**/*.py"),
    *ROOT.glob("gateway/**/*.py"),
]
NAMED = re.compile(
    r"(?:PREFIX|key|worker) \.\. '(:?[a-z_]+:?)'"  # in scripts
    r"|(?:CHORES|prefix|NAMESPACE)\}:?([a-z_]+:?)"  # in Python
    r"|^[A-Z_]+ = \"penstock:([a-z_]+)\"",
    re.MULTILINE,
)
METRICS = ROOT / "schemas" / "metrics" / "names.py"
NO_KEYS = {"inbox:", "chores"}  # a channel; arq's queue, in its own database


def test_the_page_and_the_code_name_the_same_keys() -> None:
    texts = [path.read_text() for path in CODE if path != METRICS]
    named = {part for text in texts for found in NAMED.findall(text) for part in found if part}
    shown = {part for row in rows() for part in re.split(r"<.+>", row.name) if part}
    assert named - NO_KEYS == shown


def test_a_key_gets_its_end_in_the_call_that_makes_it() -> None:
    """In a script, or by one command: who dies between two calls leaves a key for ever."""
    files = [path for path in [*CODE, *ROOT.glob("worker/**/*.py")] if path.suffix == ".py"]
    assert [path for path in files if re.search(r'"P?EXPIRE(AT)?"', path.read_text())] == []

"""The pages that are made of the code are what the code makes, and leave nothing unsaid."""

import pytest

from paths import ROOT
from reference_pages import metrics_page, settings_page


@pytest.mark.parametrize("name, made", [("settings", settings_page), ("metrics", metrics_page)])
def test_a_page_is_what_the_code_makes(name: str, made: object) -> None:
    assert callable(made)
    text = (ROOT / "docs" / f"{name}.md").read_text()
    assert text == made(), "run: python tests/support/reference_pages.py"
    silent = [
        line for line in text.splitlines() if line.startswith("| `") and line.endswith("|  |")
    ]
    assert not silent, silent

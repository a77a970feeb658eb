"""The pages that are made of the code are what the code makes, and leave nothing unsaid."""

import pytest

from paths import ROOT
from reference_pages import PAGES


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_what_the_code_makes(name: str) -> None:
    text = (ROOT / name).read_text()
    assert text == PAGES[name](), "run: python tests/support/reference_pages.py"
    silent = [
        line for line in text.splitlines() if line.startswith("| `") and line.endswith("|  |")
    ]
    assert not silent, silent

"""The pages name files that exist, and the short ones stay short."""

import ast
import re
from itertools import takewhile
from pathlib import Path
from urllib.parse import unquote

import pytest

from house.sources import ROOMS
from paths import ROOT
from penstock.schemas.event import Delta, Done, Failed
from penstock.schemas.job import Chat, Job
from penstock.schemas.params.sampling import SamplingParams, StructuredOutputs
from penstock.schemas.process.setting_names import NAMES

PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "worker" / "bundled" / "README.md"]
)
LINK = re.compile(r"\]\(([^)\s]+)\)")
NAMED = re.compile(r"`((?:[\w.-]+/)+[\w-]+\.(?:py|lua|c|h|md|json|toml|yml))`")
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def wrong(page: Path) -> list[str]:
    """What a page links to or names in backticks, from the top, and nobody finds."""
    text = FENCED.sub("", page.read_text())
    found = [each for each in NAMED.findall(text) if "NAME" not in each]
    lost = [f"`{each}`" for each in found if not (ROOT / each).exists()]
    for link in LINK.findall(text):
        target, _, part = unquote(link).partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        path = page.parent / target if target else page
        if not path.exists() or (part and part not in anchors(path)):
            lost.append(link)
    return lost


def anchors(page: Path) -> set[str]:
    """The parts of a page that a link may name."""
    heads = re.findall(r"^#+ (.+)$", FENCED.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_is_there(page: Path) -> None:
    assert wrong(page) == []


def test_a_link_to_nothing_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A head\n[a](b.md) [c](#a-head) [d](#none) `schemas/none.py` `schemas/job.py`\n"
    )
    assert wrong(page) == ["`schemas/none.py`", "b.md", "#none"]


def head(path: Path) -> str:
    """What a file says of itself: its docstring, or the comment that it begins with."""
    text = path.read_text().lstrip()
    if path.suffix == ".py":
        return ast.get_docstring(ast.parse(text)) or ""
    if path.suffix in (".c", ".h"):
        return text.partition("*/")[0]
    return "\n".join(takewhile(re.compile("--|#").match, text.splitlines()))


def fields_words() -> list[tuple[str, str]]:
    """The field's words that are said to be found in a file, each with the file."""
    rows = (ROOT / "docs" / "words.md").read_text().partition("## The field's words")[2]
    pairs = re.findall(r"^\| (.+?) \| .+ \| `(.+)` \|$", rows, re.MULTILINE)
    return [(word, name) for words, name in pairs for word in words.split(", ")]


@pytest.mark.parametrize(("word", "name"), fields_words())
def test_a_search_for_the_fields_word_finds_the_file(word: str, name: str) -> None:
    lines = head(ROOT / name).splitlines()
    assert [line for line in lines if re.search(rf"\b{re.escape(word)}", line, re.IGNORECASE)]


@pytest.mark.parametrize(("name", "most"), [("README.md", 140), ("docs/words.md", 105)])
def test_a_short_page_stays_short(name: str, most: int) -> None:
    assert len((ROOT / name).read_text().splitlines()) <= most


def test_vllms_flags_that_are_said_to_be_the_same_are_there() -> None:
    page = (ROOT / "docs" / "migrating.md").read_text()
    told = page.partition("## From vLLM's server")[2].partition("\n## ")[0]
    flags = set(re.findall(r"--([a-z][a-z-]+)", told))
    assert len(flags) > 15 and not {flag.replace("-", "_") for flag in flags} - NAMES


def test_the_page_of_plain_redis_has_each_field_of_a_job_and_of_an_event() -> None:
    page = (ROOT / "docs" / "protocol.md").read_text()
    rows = "\n".join(re.findall(r"^\|.+", page, re.MULTILINE))
    told = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", rows))))
    shapes = (Job, Chat, SamplingParams, StructuredOutputs)
    asked = {field.alias or name for each in shapes for name, field in each.model_fields.items()}
    heard = {name for each in (Delta, Done, Failed) for name in each.__struct_fields__}
    assert sorted((asked | heard) - told) == []


def test_the_architecture_names_each_room() -> None:
    told = re.findall(r"`([\w/]+)/`", (ROOT / "docs" / "architecture.md").read_text())
    tops = [ROOT / room for room in ROOMS]
    files = [path for top in tops for kind in ("*.py", "*.js") for path in top.rglob(kind)]
    rooms = {path.parent for path in files if path.stat().st_size}
    assert sorted({str(room.relative_to(ROOT)) for room in rooms} - set(told)) == []

"""The page of Redis's keys, `docs/operating.md`: of which type each is, and which of them stay."""

import re
from dataclasses import dataclass

import redis

from paths import ROOT

PAGE = ROOT / "docs" / "operating.md"
UNDER = re.compile(r", under `(penstock:.*)`$")
ROW = re.compile(r"^\| `([^`]+)` \| (\w+) \| .+ \| ([CWHO ]+) \|(.*)\|$")


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of key. `name` is as on the page, behind what all of its table begin with."""

    under: str
    name: str
    type: str
    stays: bool

    def fits(self, key: str) -> bool:
        words = re.split(r"MODEL|LANE|<\w+>", self.under + self.name)
        return re.fullmatch(".+".join(map(re.escape, words)), key) is not None


def rows() -> list[Row]:
    """The longest names first: of two that fit a key the first is meant."""
    found, under = list[Row](), ""
    for line in PAGE.read_text().partition("\n## Keys\n")[2].splitlines():
        if head := UNDER.search(line):
            under = head[1]
        elif row := ROW.match(line):
            name, kind, _, goes = row.groups()
            found.append(Row(under, name, kind.replace("text", "string"), goes.strip() == "stays"))
    return sorted(found, key=lambda row: -len(row.name))


def complaints(store: redis.Redis) -> list[str]:
    """The keys of a server that the page does not know, or knows as of another type."""
    known, names = rows(), list(store.scan_iter("penstock:*", count=1000))
    with store.pipeline(transaction=False) as pipe:
        for name in names:
            pipe.type(name)
        types = [kind.decode() for kind in pipe.execute()]
    wrong = list[str]()
    for key, kind in zip([name.decode() for name in names], types, strict=True):
        row = next((row for row in known if row.fits(key)), None)
        if row is None:
            wrong.append(f"{key} is not on the page of keys")
        elif kind not in (row.type, "none"):  # none: it went meanwhile
            wrong.append(f"{key} is a {kind}, on the page of keys a {row.type}")
    return wrong

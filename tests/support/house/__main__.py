"""`make house`: the counts beside their limits, and the same counts of the tests.

`make house LIST=words` prints the places behind those counts whose names hold the words.
The exit status is 1 when a count is over its limit.
"""

import argparse
import sys

from rich.console import Console
from rich.table import Table

from house.chat import chat_counts
from house.counts import LIMITS, Count, static_counts
from house.sources import SOURCES, TESTS


def main() -> int:
    parser = argparse.ArgumentParser(prog="house")
    parser.add_argument("--list", metavar="WORDS", help="such as names, circles or chat")
    words = parser.parse_args().list or ""
    counts = static_counts(SOURCES)
    if words in "functions and files of one chat":
        counts |= chat_counts()
    if not words:
        Console().print(_table(counts, static_counts(TESTS)))
    for name in [name for name in counts if words and words in name]:
        print(f"# {name}", *sorted(counts[name].places), sep="\n")
    excess = [name for name in counts if name in LIMITS and counts[name].value > LIMITS[name].most]
    for name in excess:
        print(f"over its limit: {name}", file=sys.stderr)
    return int(bool(excess))


def _table(counts: dict[str, Count], of_tests: dict[str, Count]) -> Table:
    table = Table("", "count", "limit", "aim", "in tests")
    for name, count in counts.items():
        figures = [f"{count.value:g}"]
        figures += (
            [f"{LIMITS[name].most:g}", f"{LIMITS[name].aim:g}"] if name in LIMITS else ["", ""]
        )
        figures += [f"{of_tests[name].value:.3g}"] if name in of_tests else [""]
        table.add_row(name, *figures)
    return table


if __name__ == "__main__":
    sys.exit(main())

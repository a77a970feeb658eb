"""Fair shares of an engine's rows among tenants, by their weights."""

from collections.abc import Iterable

from penstock.worker.engine.sequences.sequence import Sequence


def above_share(seq: Sequence, running: Iterable[Sequence]) -> list[Sequence]:
    """Return the running sequences that give way to one that waits, in the order of their doing so.

    It is each time the last of the owner that has the most rows for its weight, as long as that
    owner has at least as many without it as the waiting one's will have. So no owner is taken below
    its share, nobody loses the only row, and no two owners take a row from each other in turns.
    """
    rows: dict[str, list[Sequence]] = {}
    for peer in running:
        rows.setdefault(peer.owner, []).append(peer)
    own, victims = (len(rows.pop(seq.owner, [])) + 1) / seq.weight, []
    while rows and _left(line := max(rows.values(), key=_left)) >= own:
        victims.append(line.pop())
    return victims


def _left(line: list[Sequence]) -> float:
    """Return the rows that an owner has for its weight without the last."""
    return (len(line) - 1) / line[-1].weight

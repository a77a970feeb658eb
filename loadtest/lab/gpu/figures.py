"""The figures of one run, printed as they come."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure. `share` is of a limit that was measured or counted, such as bytes over speed."""

    part: str
    name: str
    value: float
    unit: str
    share: float | None = None
    note: str = ""


@dataclass(slots=True)
class Figures:
    rows: list[Figure] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    copy_bytes_per_s: float = float("nan")
    flops: float = float("nan")

    def add(
        self,
        part: str,
        name: str,
        value: float,
        unit: str,
        share: float | None = None,
        note: str = "",
    ) -> None:
        row = Figure(part, name, value, unit, share, note)
        self.rows.append(row)
        percent = "" if share is None else f"{share:6.0%}"
        print(f"{part:9} {name:46} {value:10.4g} {unit:8} {percent:>6}  {note}", flush=True)

"""A file of results, as any of the commands writes it, and the figures in it."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from penstock.loadtest.errors import BadOption

# What must be the same for the figures to be comparable, as far as a file says it.
OPTIONS = (
    *("backend", "model_id", "dataset_name", "num_prompts", "request_rate", "burstiness"),
    *("max_concurrency", "ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps"),
    "goodput_slos_ms",
)
OF_MACHINES = ("cpu", "cores", "features", "memory_bytes")


@dataclass(frozen=True, slots=True)
class ResultFile:
    """The JSON object of a run, a sweep or a comparison."""

    raw: Mapping[str, object]
    name: str = ""

    @classmethod
    def read(cls, path: Path, name: str = "") -> Self:
        """Raises BadOption for a file without figures."""
        try:
            raw = json.loads(path.read_bytes())
        except OSError as error:
            raise BadOption(f"{path}: {error.strerror}") from error
        except ValueError as error:
            raise BadOption(f"{path}: it is not JSON: {error}") from error
        file = cls(raw if isinstance(raw, dict) else {}, name or path.stem)
        if not any(file.sections().values()):
            commands = "`penstock bench serve --save-result`, `sweep` or `compare`"
            raise BadOption(f"{path}: no figures in it; {commands} write some")
        return file

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(self.raw) + "\n")

    @property
    def machine(self) -> Mapping[str, object]:
        machine = self.raw.get("machine")
        return machine if isinstance(machine, dict) else {}

    @property
    def load(self) -> str:
        """Return in words how requests came."""
        raw = self.raw
        if raw.get("ramp_up_strategy"):
            return f"{raw['ramp_up_start_rps']:g} to {raw['ramp_up_end_rps']:g}/s"
        if raw.get("dataset_name") == "trace":
            return "trace"
        if raw.get("request_rate") not in (None, "inf"):
            return f"{raw['request_rate']:g}/s"
        at_once = raw.get("max_concurrency")
        return f"{at_once} at once" if at_once else "all at once"

    def sections(self) -> dict[str, dict[str, float]]:
        """Return the figures of each part: a run has one, without a name."""
        points, cases = _objects(self.raw.get("points")), _objects(self.raw.get("cases"))
        if points:
            return {
                f"{point.get('server')}, {point.get('load')}": _figures(point) for point in points
            }
        if cases:
            return {
                f"{case.get('name')}, {engine.get('name')}": _figures(engine)
                for case in cases
                for engine in _objects(case.get("engines"))
            }
        return {"": _figures(self.raw)}

    def series(self) -> Iterator[tuple[str, str, dict[str, float]]]:
        """Yield for each load the name of what was loaded, the load, and the figures."""
        for point in _objects(self.raw.get("points")):
            yield str(point.get("server")), str(point.get("load")), _figures(point)
        if "points" not in self.raw and "cases" not in self.raw:
            model = Path(str(self.raw.get("model_id"))).name
            yield f"{model}, {self.raw.get('backend')}", self.load, _figures(self.raw)

    def list_of(self, key: str) -> Sequence[object]:
        value = self.raw.get(key)
        return value if isinstance(value, list) else []

    def numbers(self, key: str) -> list[float]:
        return [float(value) for value in self.list_of(key) if isinstance(value, int | float)]

    def texts(self, key: str) -> list[str]:
        return [str(value) for value in self.list_of(key)]


def differences(a: ResultFile, b: ResultFile) -> tuple[list[str], list[str]]:
    """Return sentences on how the machines differ, and on what was asked differently."""
    machines = [
        f"{key}: {_shown(a.machine.get(key))} | {_shown(b.machine.get(key))}"
        for key in OF_MACHINES
        if a.machine.get(key) != b.machine.get(key)
    ]
    options = [
        f"{key}: {_shown(a.raw.get(key))} | {_shown(b.raw.get(key))}"
        for key in OPTIONS
        if a.raw.get(key) != b.raw.get(key)
    ]
    return machines, options


def _shown(value: object) -> str:
    if value is None:
        return "not said"
    return ", ".join(map(str, value)) if isinstance(value, list) else f"{value}"


def _objects(value: object) -> list[Mapping[str, object]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _figures(of: Mapping[str, object]) -> dict[str, float]:
    return {
        key: float(value)
        for key, value in of.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and key not in OPTIONS
    }

"""The command line wins, then the environment, then the YAML file, then the default."""

from pathlib import Path

import pytest
import yaml

from paths import ROOT
from penstock.gateway.housekeeping.main import HousekeepingSettings
from penstock.gateway.process.settings import GatewaySettings
from penstock.schemas.process.start import Settings, load_settings
from penstock.worker.process.settings import WorkerSettings

EXAMPLE = ROOT / "docs" / "examples" / "penstock.yaml"
NOBODYS = "redis://127.0.0.1:1/0"  # else it looks for a `penstock up` here


@pytest.mark.parametrize(
    ("settings", "name", "of_file", "of_environment", "of_line", "words"),
    [
        (GatewaySettings, "drain_s", 7, 8, 9, []),
        (HousekeepingSettings, "batch_window", 7, 8, 9, []),
        (WorkerSettings, "max_num_seqs", 7, 8, 9, ["--model", "fake"]),
    ],
)
def test_the_nearest_wins(
    settings: type[Settings],
    name: str,
    of_file: int,
    of_environment: int,
    of_line: int,
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file, flag = tmp_path / "penstock.yaml", f"--{name.replace('_', '-')}"
    file.write_text(f"{name}: {of_file}\n")
    default = settings.model_fields[name].default

    def found(*more: str) -> object:
        given = [*words, "--redis-url", NOBODYS, *more]
        return getattr(load_settings(settings, "penstock test", given), name)

    assert found() == default != of_file
    assert found("--config", str(file)) == of_file
    monkeypatch.setenv("PENSTOCK_CONFIG", str(file))
    assert found() == of_file
    monkeypatch.setenv(f"PENSTOCK_{name.upper()}", str(of_environment))
    assert found() == of_environment
    assert found(flag, str(of_line)) == of_line


def test_the_example_is_read_by_every_part() -> None:
    said = yaml.safe_load(EXAMPLE.read_text())
    parts = [GatewaySettings, HousekeepingSettings, WorkerSettings]
    taken = set[str]()
    for part in parts:
        loaded = load_settings(part, "penstock test", ["--config", str(EXAMPLE)])
        for name in said.keys() & part.model_fields.keys():
            value = getattr(loaded, name)
            assert value == said[name], (part, name)
            taken.add(name)
    assert taken == said.keys(), "a setting of no part"

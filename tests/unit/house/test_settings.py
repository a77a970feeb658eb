"""What a command is told, in whatever way: it has its effect, or is refused by name."""

import subprocess
import sys
from pathlib import Path

import pytest

from penstock.compose.cli import main
from penstock.gateway.commands.keys import ListKeys
from penstock.schemas.process.setting_names import unknown_variables


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    """The lines that a command of `penstock` ends with before it begins anything."""
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    said = capsys.readouterr()
    assert (ended.value.code, said.out) == (2, "")
    return said.err.splitlines()


@pytest.mark.parametrize("command", ["gateway", "worker --model fake", "up", "keys list"])
def test_what_is_no_setting_is_refused_by_name_with_the_nearest_one(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
) -> None:
    """Of a file and the environment; what another command would take is none of it."""
    file = tmp_path / "settings.yaml"
    file.write_text("max_modellen:\nnum_lanes: 2\ndrain_s: 3\n")
    for name in ("MAX_NUM_SEQ", "DRAIN_S", "LEASE_TTL_MS"):
        monkeypatch.setenv(f"PENSTOCK_{name}", "900")
    of_file, of_environment = refused(capsys, *command.split(), "--config", str(file))
    assert "max_modellen is no setting: did you mean max_model_len?" in of_file
    assert "PENSTOCK_MAX_NUM_SEQ in the environment is no setting" in of_environment
    assert "did you mean PENSTOCK_MAX_NUM_SEQS?" in of_environment


@pytest.mark.parametrize(
    "text, why",
    [
        (None, "cannot be read: No such file"),
        ("a: [b", "is not YAML"),
        ("- max_model_len", "a setting a line"),
        ("port: many", "settings.yaml: port: Input should be a valid integer"),
        ("webhook_private: [http://a:1, b]", "settings.yaml: webhook_private: b is not like"),
    ],
)
def test_a_file_that_says_nothing_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, why: str
) -> None:
    file = tmp_path / "settings.yaml"
    if text is not None:
        file.write_text(text)
    [line] = refused(capsys, "gateway", f"--config={file}")
    assert why in line


@pytest.mark.parametrize(
    "words, why",
    [
        ("keys create --tenat x", "--tenat is not known: did you mean --tenant?"),
        ("gateway --max-conn 3", "--max-conn is not known"),
        ("gateway more", "more is not known"),
        ("gateway --port", "--port: expected one argument"),
        ("dlq list --redis-url nowhere", "--redis-url: no scheme"),
        ("webhooks list --redis-url nowhere", "--redis-url: no scheme"),
        ("up --redis-url nowhere", "--redis-url: no scheme"),
        ("up --webhook-private example.com", "--webhook-private: example.com is not like http://"),
        ("keys create --scopes all", "--scopes: Input should be 'inference'"),
        ('worker --model x --kv-events-config {"publisher":"zmq"}', "Input should be 'redis'"),
        ('worker --model x --kv-events-config {"topic":"kv"}', "--kv-events-config-topic: Extra"),
        (
            "worker --model x --no-enable-prefix-caching --kv-events-config"
            ' {"enable_kv_cache_events":true}',
            "--kv-events-config: it tells of the prefix cache, which enable_prefix",
        ),
    ],
)
def test_a_wrong_word_costs_one_line(
    capsys: pytest.CaptureFixture[str], words: str, why: str
) -> None:
    [line] = refused(capsys, *words.split())
    assert why in line


def test_a_wrong_value_is_said_of_the_place_that_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A flag or a variable hides what the file says, right or wrong."""
    file = tmp_path / "settings.yaml"
    file.write_text("port: many\n")
    words = ["gateway", f"--config={file}"]
    [line] = refused(capsys, *words)
    assert f"gateway: {file}: port: " in line
    [line] = refused(capsys, *words, "--port=few")
    assert "gateway: --port: " in line
    monkeypatch.setenv("PENSTOCK_PORT", "none")
    [line] = refused(capsys, *words)
    assert "gateway: PENSTOCK_PORT in the environment: " in line
    monkeypatch.setenv("PENSTOCK_PORT", "0")
    file.write_text("port: many\nhead_timeout_s: soon\n")
    [line] = refused(capsys, *words)
    assert f"gateway: {file}: head_timeout_s: " in line


def test_variables_of_others_are_no_settings_of_ours() -> None:
    """Of Kubernetes for a service `penstock-gateway`, of the tests, and of names like ours."""
    assert not unknown_variables(
        {
            "PENSTOCK_GATEWAY_SERVICE_HOST": "10.0.0.1",
            "PENSTOCK_GATEWAY_SERVICE_PORT_HTTP": "80",
            "PENSTOCK_GATEWAY_PORT": "tcp://10.0.0.1:80",
            "PENSTOCK_GATEWAY_PORT_80_TCP_ADDR": "10.0.0.1",
            "PENSTOCK_SERVER": "/usr/bin/redis-server",
            "PENSTOCK_CRASH_AT": "x",
            "PENSTOCKS": "1",
            "JSON": "1",
        }
    )
    assert unknown_variables({"PENSTOCK_GATEWAY_PORT": "80"})


def test_a_variable_is_a_setting_by_its_prefix_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program's `JSON` is none."""
    monkeypatch.setenv("JSON", "1")
    assert not ListKeys().as_json
    monkeypatch.setenv("PENSTOCK_JSON", "1")
    assert ListKeys().as_json


@pytest.mark.parametrize("flag", ["--files-folder", "--server-secret-file"])
def test_a_path_that_cannot_be_used_is_said_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: str
) -> None:
    monkeypatch.delenv("PENSTOCK_SERVER_SECRET")
    (tmp_path / "file").write_text("")
    words = ["gateway", "--port", "0", flag, str(tmp_path / "file" / "below")]
    ended = subprocess.run(
        [sys.executable, "-m", "penstock.compose.cli", *words],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 2
    [line] = ended.stderr.splitlines()
    assert str(tmp_path / "file") in line and "Not a directory" in line

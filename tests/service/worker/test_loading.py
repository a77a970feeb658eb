"""A model that cannot be loaded is refused in one line that names the file, and for good."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import pytest

import judges
import tokenizers_made
from penstock.schemas.errors import InvalidJob
from penstock.schemas.process.exit_status import NEVER_STARTS
from penstock.schemas.process.start import load_settings
from penstock.worker.llm import LLM
from penstock.worker.process.settings import WorkerSettings

Damage = Callable[[Path], object]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("judge")
    judges.save("llama", folder, max_shard_size="2MB")
    return tokenizers_made.save(tokenizers_made.byte_level(), folder)


def damaged(whole: Path, to: Path, damage: Damage) -> Path:
    shutil.copytree(whole, to)
    damage(to)
    return to


def written(name: str, content: str | bytes) -> Damage:
    raw = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / name).write_bytes(raw)


def with_fields(name: str, **fields: object) -> Damage:
    def change(folder: Path) -> None:
        found = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(found | fields))

    return change


def without(*names: str) -> Damage:
    return lambda folder: [path.unlink() for name in names for path in folder.glob(name)]


def cut(name: str) -> Damage:
    def change(folder: Path) -> None:
        [path] = folder.glob(name)
        os.truncate(path, path.stat().st_size // 2)

    return change


def replaced(name: str, by: Damage, also: str = "") -> Damage:
    def change(folder: Path) -> None:
        without(name, also or name)(folder)
        by(folder)

    return change


SHARD = "model-00002-of-*.safetensors"
INDEX = "model.safetensors.index.json"
ROPE = {"rope_type": "default", "rope_theta": 1e4}
STRANGE_PIECES: dict[str, object] = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<none>", "type_id": 0}}],
    "pair": [],
    "special_tokens": {},
}
DAMAGES: dict[str, tuple[Damage, str]] = {
    "tokenizer of no model": (written("tokenizer.json", "{}"), r"/tokenizer\.json: .*fetch it"),
    "tokenizer cut short": (cut("tokenizer.json"), r"/tokenizer\.json: not JSON: .*fetch it"),
    "tokenizer of a newer kind": (
        with_fields("tokenizer.json", decoder={"type": "Newer"}),
        r"/tokenizer\.json: tokenizers \d.* newer version of tokenizers",
    ),
    "tokenizer that panics when used": (
        with_fields("tokenizer.json", post_processor=STRANGE_PIECES),
        r"/tokenizer\.json: ",
    ),
    "tokenizer's settings a list": (written("tokenizer_config.json", "[]"), r"tokenizer_config"),
    "added tokens no JSON": (written("added_tokens.json", "{"), r"/added_tokens\.json: "),
    "end token of a wrong type": (
        with_fields("tokenizer_config.json", eos_token=3),
        r"tokenizer .*eos_token",
    ),
    "template of broken grammar": (
        written("chat_template.jinja", "{% for %}"),
        r"/chat_template\.jinja: .*mend it",
    ),
    "template in the settings": (
        replaced("*.jinja", with_fields("tokenizer_config.json", chat_template="{% if %}")),
        r"/tokenizer_config\.json: .*template",
    ),
    "template that is a number": (
        replaced("*.jinja", with_fields("tokenizer_config.json", chat_template={"default": 3})),
        r"chat_template is a int",
    ),
    "no tokenizer": (without("tokenizer*"), r"tokenizer is missing; put .*tokenizer\.json there"),
    "a sentencepiece file alone": (
        replaced("tokenizer*", written("tokenizer.model", b"\n")),
        r"tokenizer\.model.* make a tokenizer\.json .*save_pretrained",
    ),
    "no configuration": (without("config.json"), r"/config\.json: No such file"),
    "configuration no JSON": (written("config.json", "{"), r"/config\.json: not JSON"),
    "generation's no object": (written("generation_config.json", "[]"), r"generation_config\.json"),
    "no heads": (
        with_fields("config.json", num_attention_heads=0),
        r"num_attention_heads is 0; this decoder computes 1 or more",
    ),
    "no layers": (with_fields("config.json", num_hidden_layers=0), r"num_hidden_layers is 0"),
    "heads that do not divide": (
        with_fields("config.json", num_attention_heads=3),
        r"config\.json: .*not a multiple of the number of attention heads",
    ),
    "heads of a negative size": (with_fields("config.json", head_dim=-2), r"head_dim is -2"),
    "numbers of another type": (with_fields("config.json", dtype="int8"), r"dtype is torch\.int8"),
    "a negative epsilon": (with_fields("config.json", rms_norm_eps=-1.0), r"rms_norm_eps is -1"),
    "a rotation that is a text": (
        with_fields("config.json", rope_parameters=ROPE | {"rope_theta": "x"}),
        r"config\.json: rope_parameters\.rope_theta is 'x'",
    ),
    "a stretch by nothing": (
        with_fields("config.json", rope_parameters=ROPE | {"rope_type": "linear", "factor": 0}),
        r"config\.json: rope_parameters\.factor is 0",
    ),
    "more than memory holds": (
        with_fields("config.json", hidden_size=2**40),
        r"memory does not suffice .*quantization",
    ),
    "a shard cut short": (cut(SHARD), r"/model-00002-of-\d+\.safetensors: not a whole"),
    "a shard is missing": (without(SHARD), r"/model-00002-of-\d+\.safetensors: "),
    "index no JSON": (written(INDEX, "{"), r"index\.json: not an index"),
    "weights of an older form alone": (
        replaced("*.safetensors", written("pytorch_model.bin", b"x"), INDEX),
        r"pytorch_model\.bin: not a whole file of torch",
    ),
    "no weights": (without("*.safetensors", INDEX), r"fetch the model again"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_model_is_refused_by_its_files_name(
    name: str, whole: Path, tmp_path: Path
) -> None:
    damage, says = DAMAGES[name]
    with pytest.raises(InvalidJob, match=says) as refused:
        LLM(str(damaged(whole, tmp_path / "model", damage)))
    assert refused.value.param == "model"
    assert "\n" not in refused.value.message and len(refused.value.message) < 1000


@pytest.mark.slow
def test_a_worker_that_cannot_load_says_so_once_and_is_not_started_again(
    whole: Path, tmp_path: Path, redis_url: str
) -> None:
    """All at once: each takes some seconds to start."""
    tried = {
        "tokenizer of a newer kind": [],
        "a shard cut short": ["--in-process"],
    }
    workers = {}
    for name, flags in tried.items():
        model = damaged(whole, tmp_path / name.replace(" ", "_"), DAMAGES[name][0])
        words = ["--model", str(model), "--redis-url", redis_url, *flags]
        workers[name] = subprocess.Popen(
            [sys.executable, "-m", "penstock.worker.supervisor.cli", *words],
            stderr=subprocess.PIPE,
            text=True,
        )
    for name, worker in workers.items():
        _, logged = worker.communicate(timeout=100)
        assert worker.returncode == NEVER_STARTS, logged
        [line] = [each for each in logged.splitlines() if not re.search(" (INFO|WARNING) ", each)]
        assert " ERROR " in line and "worker ended with status 3" in logged
        assert re.search(DAMAGES[name][1], line)


def test_of_a_name_on_the_hub_no_more_is_fetched_than_is_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[set[str]] = []
    named: list[tuple[str, str | None]] = []

    def fetch(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append(set(allow_patterns))
        named.append((name, revision))
        return str(tmp_path)

    (tmp_path / "model.safetensors").touch()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    servers = {"engine": "openai", "engine_url": ["http://here"]}
    for given in ({}, servers, {"trust_remote_code": True}):
        settings = WorkerSettings.model_validate({"model": "org/model"} | given)
        assert settings.checkpoint() == tmp_path
    plain, of_servers, trusted = asked
    assert plain - of_servers == {"*.safetensors"} and trusted - plain == {"*.py"}
    other = {"model": "org/model", "revision": "v2", "tokenizer": "org/words"}
    settings = WorkerSettings.model_validate(other)
    assert settings.checkpoint() == settings.tokenizer_folder() == tmp_path
    assert named[-2:] == [("org/model", "v2"), ("org/words", None)]
    (tmp_path / "model.safetensors").unlink()
    settings.checkpoint()
    assert asked[-2] == plain and asked[-1] == {"pytorch_model*.bin", "[0-9]_*/pytorch_model*.bin"}
    assert named[-2:] == [("org/model", "v2")] * 2


def test_what_the_tokenizer_cannot_encode_is_the_jobs_fault_alone(
    whole: Path, tmp_path: Path
) -> None:
    words = {"type": "WordLevel", "vocab": {"<s>": 1, "</s>": 2, "a": 3}, "unk_token": "<none>"}
    damage = with_fields("tokenizer.json", model=words)
    llm = LLM(str(damaged(whole, tmp_path / "model", damage)))
    with pytest.raises(
        InvalidJob, match="prompt: the model's tokenizer cannot encode it"
    ) as refused:
        llm.generate("b")
    assert refused.value.param == "prompt"
    assert llm.generate("a")


def test_overrides_are_given_as_json_in_every_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(*words: str) -> object:
        return load_settings(WorkerSettings, "penstock worker", ["--model", "x", *words])

    file = tmp_path / "worker.yaml"
    file.write_text("hf_overrides:\n  rope_theta: 5.0\n")
    wanted = WorkerSettings(model="x", hf_overrides={"rope_theta": 5.0}).hf_overrides
    given = told("--hf-overrides", '{"rope_theta": 5.0}'), told("--config", str(file))
    monkeypatch.setenv("PENSTOCK_HF_OVERRIDES", '{"rope_theta": 5.0}')
    for settings in (*given, told()):
        assert isinstance(settings, WorkerSettings) and settings.hf_overrides == wanted
    for wrong in ("{x", "[1]", "rope_theta=5"):
        with pytest.raises(SystemExit):
            told("--hf-overrides", wrong)
        assert "penstock worker: --hf-overrides: " in capsys.readouterr().err

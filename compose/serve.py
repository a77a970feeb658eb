"""`penstock serve MODEL`: runs `penstock up` for one model; takes worker and gateway flags too.

Users of vLLM type `vllm serve MODEL --max-model-len 4096`. Flags that `penstock up` itself does not
read are handed to the worker and the gateway through the environment.
"""

import json
import os
import sys
from collections.abc import Iterator

from pydantic import SecretStr

from penstock.compose.local import LocalSettings, up
from penstock.gateway.process.settings import GatewaySettings
from penstock.schemas.process.exit_status import BAD_USAGE
from penstock.schemas.process.setting_names import PREFIX
from penstock.schemas.process.start import load_settings
from penstock.worker.process.settings import WorkerSettings

PROGRAM = "penstock serve"


class ServeSettings(LocalSettings, GatewaySettings, WorkerSettings):
    """Run server, gateway, worker and housekeeping on this machine, for one model.

    The model is the first word: a checkpoint's folder, a name on the Hugging Face hub, or
    penstock-5m. Every flag of `penstock worker` and `penstock gateway` counts here too.
    """


def handed_on(settings: ServeSettings) -> Iterator[tuple[str, str]]:
    """Yield the variables that tell worker and gateway what `penstock up` does not read itself."""
    for name in sorted(settings.model_fields_set - LocalSettings.model_fields.keys()):
        value: object = getattr(settings, name)
        if isinstance(value, SecretStr):
            value = value.get_secret_value()
        if isinstance(value, list):
            value = ",".join(map(str, value))
        if isinstance(value, dict):
            value = json.dumps(value)
        if value is not None:
            yield f"{PREFIX}{name.upper()}", str(value)


def main(argv: list[str]) -> int:
    if not argv or (argv[0].startswith("-") and argv[0] not in ("-h", "--help")):
        print(f"{PROGRAM}: name a model first: {PROGRAM} MODEL [--flag VALUE ...]", file=sys.stderr)
        return BAD_USAGE
    for flag, instead in (
        ("--model", "the first word names it"),
        ("--fd", "give --host and --port"),
    ):
        if any(word.split("=")[0] == flag for word in argv):
            print(f"{PROGRAM}: {flag} is not taken here: {instead}", file=sys.stderr)
            return BAD_USAGE
    words = argv if argv[0].startswith("-") else ["--model", *argv]
    settings = load_settings(ServeSettings, PROGRAM, words)
    os.environ.update(handed_on(settings))
    return up(settings, PROGRAM)

"""The files that settings name: a model's folder, and a chat template."""

from pathlib import Path

from penstock.schemas.errors import InvalidJob
from penstock.worker.bundled.paths import BUNDLED_MODEL


def model_folder(
    name: str,
    with_weights: bool = True,
    with_code: bool = False,
    revision: str | None = None,
    param: str = "model",
) -> Path:
    """Return the folder of that name, or of the bundled model, or fetched from the hub.

    What was fetched before is found in the hub's local cache. Raises InvalidJob, which names the
    setting `param`.
    """
    try:
        folder = Path(name).expanduser()
        is_here = folder.is_dir()
    except (OSError, RuntimeError, ValueError) as error:  # not to be looked at, or nobody's home
        raise InvalidJob(f"{param}: {name!r} cannot be read: {error}", param) from error
    if is_here or name == BUNDLED_MODEL.name:
        if revision is not None:
            raise InvalidJob(f"revision: {name!r} is a folder, which has none", "revision")
        return folder if is_here else BUNDLED_MODEL
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        hint = f"neither a folder nor a name like org/model; {BUNDLED_MODEL.name} is bundled"
        raise InvalidJob(f"{param}: {name!r} is {hint}", param)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    patterns = ["*.json", "*.jinja", "*.model"]
    patterns += ["*.safetensors"] * with_weights + ["*.py"] * with_code
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        message = " ".join(str(error).split())
        raise InvalidJob(f"{param}: {name!r} could not be fetched: {message}", param) from error


def given_template(template: str | None) -> str | None:
    """Return the chat template that a setting gives: the text of a file, or the setting itself.

    Raises InvalidJob where it is neither.
    """
    if template is None or "{" in template or "\n" in template:
        return template
    try:
        return Path(template).expanduser().read_text()
    except (OSError, RuntimeError, ValueError) as error:
        why = f"chat_template: {template!r} is neither a file nor a template: {error}"
        raise InvalidJob(why, "chat_template") from error

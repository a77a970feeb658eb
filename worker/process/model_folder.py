"""The files that settings name: a model's folder, and a chat template."""

from pathlib import Path

from penstock.schemas.errors import InvalidJob
from penstock.worker.bundled.paths import BUNDLED_MODEL
from penstock.worker.models.folder.errors import ModelError
from penstock.worker.models.folder.files import OLD_WEIGHTS, SAFETENSORS, TEXTS, weights_file
from penstock.worker.models.folder.forms import other_form
from penstock.worker.models.folder.gguf.files import SUFFIX, gguf_files, is_gguf
from penstock.worker.models.folder.gguf.folder import folder_of
from penstock.worker.process.object_folder import is_object_url, object_folder


def model_folder(
    name: str,
    with_weights: bool = True,
    with_code: bool = False,
    revision: str | None = None,
    param: str = "model",
) -> Path:
    """Return the folder of that name, or the bundled model's, or one fetched from hub or store.

    Of a file in GGUF, or a folder with one, it is the folder that is made of its metadata.

    What was fetched before is found in a local cache. Raises InvalidJob, which names the
    setting `param`.
    """
    folder, in_store = _path(name, param), is_object_url(name)
    is_here = folder.is_dir() or is_gguf(folder)
    if (in_store or is_here) and revision is not None:
        raise InvalidJob(f"revision: {name!r} is a folder, which has none", "revision")
    if not is_here and name == BUNDLED_MODEL.name:
        return BUNDLED_MODEL
    if in_store:
        folder = object_folder(name, with_weights, with_code, param)
    elif not is_here:
        _refuse_no_name(name, folder, param)
        folder = _fetched(name, with_weights, with_code, revision, param)
    return _in_form(folder, with_weights, param)


def _in_form(folder: Path, with_weights: bool, param: str) -> Path:
    """Return the folder in the form that is read. Raises InvalidJob for another form."""
    folder = _of_gguf(folder, with_weights, param)
    if param == "model" and (sentence := other_form(folder, with_weights)):
        raise InvalidJob(f"model: {sentence}", param)
    return folder


def _path(name: str, param: str) -> Path:
    """Return a name as a path. Raises InvalidJob for one that cannot be looked at."""
    try:
        path = Path(name).expanduser()
        path.is_dir()
    except (OSError, RuntimeError, ValueError) as error:  # not to be looked at, or nobody's home
        raise InvalidJob(f"{param}: {name!r} cannot be read: {error}", param) from error
    return path


def _of_gguf(folder: Path, with_weights: bool, param: str) -> Path:
    """Return the folder that is made of a model in GGUF, or the same where none is needed."""
    if not with_weights and (folder / "config.json").is_file():
        return folder
    from penstock.kernels.cpu.cache_folder import own_folder, user_cache

    try:
        files = gguf_files(folder)
        return folder_of(files, own_folder(user_cache()) / "gguf") if files else folder
    except ModelError as error:
        raise InvalidJob(f"{param}: {error}", param) from error
    except OSError as error:
        raise InvalidJob(f"{param}: {folder} cannot be read: {error}", param) from error


def _refuse_no_name(name: str, folder: Path, param: str) -> None:
    """Refuse what is no name of the hub's."""
    if folder.suffix == SUFFIX:
        raise InvalidJob(f"{param}: {name!r} is not there", param)
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        kind = "a file, not a folder or" if folder.is_file() else "neither a folder nor"
        hint = f"{kind} a name like org/model; {BUNDLED_MODEL.name} is bundled"
        raise InvalidJob(f"{param}: {name!r} is {hint}", param)


def _fetched(
    name: str, with_weights: bool, with_code: bool, revision: str | None, param: str
) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    patterns = [*TEXTS, *["*.safetensors"] * with_weights, *["*.py"] * with_code]
    try:
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
        if with_weights and weights_file(folder, SAFETENSORS) is None:
            patterns = [OLD_WEIGHTS, f"[0-9]_*/{OLD_WEIGHTS}"]  # the latter: of sentence models
            snapshot_download(name, revision=revision, allow_patterns=patterns)
        return folder
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

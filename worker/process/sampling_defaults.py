"""A model's own defaults for sampling, which count for jobs that do not say otherwise."""

from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import JsonValue, ValidationError

from penstock.schemas.errors import InvalidJob
from penstock.schemas.params.sampling import MODEL_DEFAULTS, SamplingParams
from penstock.worker.models.folder.files import read_object
from penstock.worker.process.loading import loading
from penstock.worker.process.model_folder import model_folder
from penstock.worker.process.settings import WorkerSettings

_FILE = "generation_config.json"


@dataclass(frozen=True, slots=True)
class Generation:
    """A model's values for the fields of `MODEL_DEFAULTS`; others have their usual default."""

    defaults: Mapping[str, JsonValue]

    def applied(self, params: SamplingParams) -> SamplingParams:
        """Return the parameters with the model's defaults for what they do not give.

        A search of beams has none: it draws nothing, and ranks by the model's own probabilities.
        """
        names = self.defaults.keys() - params.given()
        if not names or params.use_beam_search:
            return params
        return params.model_copy(update={name: self.defaults[name] for name in names})

    def without(self, unsupported_fields: frozenset[str]) -> "Generation":
        """Return the defaults that an engine obeys; what it does not obey can only be its own."""
        names = self.defaults.keys() - unsupported_fields
        return Generation({name: self.defaults[name] for name in names})


def load_generation(settings: WorkerSettings) -> Generation:
    """Return the sampling defaults that the settings ask for.

    They come from the model's folder, another folder or nowhere; values that the settings override
    go before them. Raises InvalidJob that names what is wrong.
    """
    values = _from_folder(settings) | settings.override_generation_config
    defaults = {
        name: value
        for name, value in values.items()
        if name in MODEL_DEFAULTS and value is not None
    }
    if extras := settings.override_generation_config.keys() - MODEL_DEFAULTS:
        raise InvalidJob(
            f"override_generation_config: {', '.join(sorted(extras))} cannot be given; known are "
            f"{', '.join(sorted(MODEL_DEFAULTS))}",
            "override_generation_config",
        )
    try:
        valid = SamplingParams.model_validate(defaults)
    except ValidationError as refusal:
        first = refusal.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"]))
        raise InvalidJob(
            f"generation_config: {field}: {first['msg']}, got {first['input']!r:.60}; mend "
            f"{_FILE}, or leave it out by --generation-config vllm",
            "generation_config",
        ) from None
    return Generation({name: getattr(valid, name) for name in defaults})


def _from_folder(settings: WorkerSettings) -> dict[str, JsonValue]:
    source = settings.generation_config
    if settings.is_fake or source == "vllm":
        return {}
    folder = (
        settings.checkpoint()
        if source == "auto"
        else model_folder(source, with_weights=False, param="generation_config")
    )
    path = folder / _FILE
    if source == "auto" and not path.exists():
        return {}
    with loading(str(path)):
        return read_object(path)

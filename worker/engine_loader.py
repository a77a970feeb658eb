"""The engine that a worker runs, built from its settings."""

import os

from penstock.schemas.errors import InvalidJob
from penstock.worker.engine.any_engine import AnyEngine
from penstock.worker.engine.fake import fake_engine
from penstock.worker.engine.io.config import EngineConfig
from penstock.worker.engine.io.setting_facts import Obeyed, facts, unusual
from penstock.worker.process.loading import loading
from penstock.worker.process.settings import WorkerSettings


def load_engine(settings: WorkerSettings) -> AnyEngine:
    if settings.load_format == "fake":
        _refuse_unheard(settings, "fake", "the fake model")
        return fake_engine(
            settings.max_model_len,
            settings.max_num_seqs,
            settings.block_size,
            settings.fake_step_ms / 1000,
            settings.fake_poison,
            settings.fake_stamps,
            settings.max_num_batched_tokens or 2048,
        )
    if settings.engine == "openai":
        from penstock.worker.external.openai_engine import load_openai_engine

        return load_openai_engine(settings)
    if settings.engine == "vllm":
        from penstock.worker.external.vllm_engine import load_vllm_engine

        return load_vllm_engine(settings)
    # Before torch is loaded: libgomp's spinning makes a busy neighbour very expensive.
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")
    with loading(settings.model):
        pools = settings.pools
        if pools:
            _refuse_unheard(settings, "vectors", "a model that makes vectors")
            from penstock.worker.engine.pooling import build_pooling_engine

            return build_pooling_engine(_config(settings))
        _refuse_unheard(settings, "text", "a model of text")
        from penstock.worker.engine.build import build_engine

        return build_engine(_config(settings))


def _refuse_unheard(settings: WorkerSettings, kind: str, name_of_kind: str) -> None:
    """Raise InvalidJob for a setting that would have no effect on a model of this kind."""
    values = unusual(settings)
    for name, fact in facts(type(settings), Obeyed).items():
        if name in values and not fact.by(kind) and values[name] not in fact.neutral:
            raise InvalidJob(f"{name}: {name_of_kind} does not obey it; leave it out", name)


def _config(settings: WorkerSettings) -> EngineConfig:
    values = {name: value for name, value in settings if name in EngineConfig.model_fields}
    folders = {"model": settings.checkpoint(), "tokenizer": settings.tokenizer_folder()}
    return EngineConfig.model_validate(values | folders)

"""Vectors, classes and scores, against sentence-transformers on the same folder."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from sentence_transformers import CrossEncoder, SentenceTransformer
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import sentence_folders
from penstock.schemas.errors import InputTooLong, InvalidJob, PenstockError, UnsupportedTask
from penstock.schemas.job import Job
from penstock.schemas.params.pooling import PoolingParams, from_base64, to_base64
from penstock.worker.bundled.paths import BUNDLED_MODEL
from penstock.worker.engine.io.config import EngineConfig
from penstock.worker.engine.io.messages import AddSequence, Output
from penstock.worker.engine.pooling import PoolingEngine, build_pooling_engine
from penstock.worker.llm import LLM
from penstock.worker.models.contract.spec import ModelSpec
from penstock.worker.models.folder.errors import ModelError
from penstock.worker.models.folder.sentence_folder import PoolerConfig, pools, read_sentence_folder
from penstock.worker.models.pooling_model import TextIds, like_lengths, load_pooling_model
from penstock.worker.process.fingerprint import fingerprint
from penstock.worker.process.settings import WorkerSettings
from penstock.worker.text.model_tokenizer import ModelTokenizer
from penstock.worker.text.text_inputs import read_inputs
from sentence_folders import CLASSIFIERS, EMBEDDERS, TEXTS, Kind

TOLERANCE = 1e-4
QUERY = "the fox is here; where is the dog?"
LONG = " ".join(["over the lazy dog"] * 60)
Rows = np.ndarray[tuple[int, int], np.dtype[np.float32]]


@pytest.fixture(scope="module")
def sentences(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Kind], Path]:
    root, made = tmp_path_factory.mktemp("pooling"), dict[int, Path]()

    def of(kind: Kind) -> Path:
        if id(kind) not in made:
            made[id(kind)] = sentence_folders.save(kind, root / str(len(made)))
        return made[id(kind)]

    return of


def engine_of(folder: Path, **fields: object) -> PoolingEngine:
    # Two threads take turns where texts are timed; the tests are not about that.
    return build_pooling_engine(EngineConfig(model=folder, max_num_batched_tokens=400, **fields))  # type: ignore[arg-type]


def vectors(
    engine: PoolingEngine, text: ModelTokenizer, prompts: Sequence[str], **pooling: object
) -> Rows:
    """What a job's prompts get, by the way that a worker takes."""
    asked = PoolingParams.model_validate({"truncate_prompt_tokens": -1, **pooling})
    job = Job(job_id="job", model="m", prompts=list(prompts), pooling=asked)
    for number, (ids, split) in enumerate(read_inputs(text, prompts, asked, engine.limits)):
        engine.add(AddSequence(str(number), ids, job.params, pooling=asked, split=split))
    rows = {each.seq_id: each for each in run(engine)}
    assert all(each.error is None and each.finish_reason == "stop" for each in rows.values())
    numbers = [rows[str(number)].vector or b"" for number in range(len(prompts))]
    return np.array([from_base64(to_base64(each)) for each in numbers], np.float32)


def run(engine: PoolingEngine) -> list[Output]:
    outputs = []
    while engine.busy:
        outputs += engine.step()
    assert engine.load().num_held_blocks == 0
    return outputs


@torch.inference_mode()
def logits_of(path: Path, texts: Sequence[str]) -> Rows:
    """What transformers' module makes of each text alone."""
    module = AutoModelForSequenceClassification.from_pretrained(path)
    encode = AutoTokenizer.from_pretrained(path)
    cut = {"truncation": True, "max_length": sentence_folders.LENGTH, "return_tensors": "pt"}
    rows = [module(**encode(each, **cut)).logits[0] for each in texts]
    return torch.stack(rows).numpy()


@pytest.mark.parametrize("name", EMBEDDERS)
def test_embeddings_equal_sentence_transformers(
    name: str, sentences: Callable[[Kind], Path]
) -> None:
    path = sentences(EMBEDDERS[name])
    engine, text = engine_of(path), ModelTokenizer(path)
    texts = [*TEXTS, LONG]
    wanted = SentenceTransformer(str(path), device="cpu").encode(texts)
    is_normalised = EMBEDDERS[name].normalises
    found = vectors(engine, text, texts, use_activation=is_normalised)
    assert np.abs(found - wanted).max() < TOLERANCE
    # As the folder says; one that says nothing has embeddings of length 1.
    usual = vectors(engine, text, texts[:3])
    if EMBEDDERS[name].pooling is None:
        wanted = wanted / np.linalg.norm(wanted, axis=1, keepdims=True)
    assert np.abs(usual - wanted[:3]).max() < TOLERANCE
    first = wanted[:3, :8]
    if is_normalised or EMBEDDERS[name].pooling is None:
        first = first / np.linalg.norm(first, axis=1, keepdims=True)
    assert np.abs(vectors(engine, text, texts[:3], dimensions=8) - first).max() < TOLERANCE


@pytest.mark.parametrize("name", ["bert", "qwen3"])
def test_scores_of_an_embedder_are_cosines(name: str, sentences: Callable[[Kind], Path]) -> None:
    path = sentences(EMBEDDERS[name])
    judge = SentenceTransformer(str(path), device="cpu")
    queries, texts = [QUERY, LONG, "fox"], TEXTS[:3]
    wanted = judge.similarity_pairwise(judge.encode(queries), judge.encode(texts))
    engine, text = engine_of(path), ModelTokenizer(path)
    found = vectors(engine, text, texts, task="score", queries=queries)
    assert np.abs(found[:, 0] - wanted.numpy()).max() < TOLERANCE
    found = vectors(engine, text, TEXTS, task="score", queries=[QUERY])
    wanted = judge.similarity(judge.encode([QUERY]), judge.encode(TEXTS))[0]
    assert np.abs(found[:, 0] - wanted.numpy()).max() < TOLERANCE


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_classes_and_scores_equal_a_cross_encoder(
    name: str, sentences: Callable[[Kind], Path]
) -> None:
    kind = CLASSIFIERS[name]
    path = sentences(kind)
    engine, text = engine_of(path), ModelTokenizer(path)
    judge = CrossEncoder(str(path), device="cpu", activation_fn=torch.nn.Identity())
    texts = [*TEXTS[:9], LONG]
    logits = logits_of(path, texts)
    raw = vectors(engine, text, texts, use_activation=False)
    assert np.abs(raw - logits).max() < TOLERANCE
    makes = torch.sigmoid if kind.labels == 1 else lambda each: torch.softmax(each, -1)
    found = vectors(engine, text, texts, task="classify")
    assert np.abs(found - makes(torch.tensor(logits)).numpy()).max() < TOLERANCE
    if kind.labels != 1:
        assert engine.facts.tasks == ("classify",)
        return
    pairs = [(QUERY, each) for each in [*texts, "fox " * 70]] + [(LONG, "fox"), (LONG, LONG)]
    wanted = torch.sigmoid(torch.tensor(judge.predict(pairs))).numpy().ravel()
    queries, documents = [list(each) for each in zip(*pairs, strict=True)]
    found = vectors(engine, text, documents, task="score", queries=queries)
    assert np.abs(found[:, 0] - wanted).max() < TOLERANCE


def test_a_folder_says_what_is_made_of_a_classifiers_numbers(
    sentences: Callable[[Kind], Path], tmp_path: Path
) -> None:
    path = sentence_folders.save(CLASSIFIERS["reranker"], tmp_path / "m")
    fields = json.loads((path / "config.json").read_text())
    fields["sentence_transformers"] = {"activation_fn": "torch.nn.modules.activation.Tanh"}
    (path / "config.json").write_text(json.dumps(fields))
    wanted = CrossEncoder(str(path), device="cpu").predict([(QUERY, each) for each in TEXTS[:4]])
    found = vectors(engine_of(path), ModelTokenizer(path), TEXTS[:4], task="score", queries=[QUERY])
    assert np.abs(found[:, 0] - wanted.ravel()).max() < TOLERANCE
    fields["sentence_transformers"] = {"activation_fn": "os.system"}
    (path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ModelError, match="activation_fn"):
        engine_of(path)


def test_texts_that_the_folder_names_go_before(
    sentences: Callable[[Kind], Path], tmp_path: Path
) -> None:
    path = sentence_folders.save(EMBEDDERS["bert"], tmp_path / "m")
    prompts = {"query": "the query: ", "other": "dog "}
    told = {"prompts": prompts, "default_prompt_name": "other"}
    (path / "config_sentence_transformers.json").write_text(json.dumps(told))
    engine, text = engine_of(path), ModelTokenizer(path)
    judge = SentenceTransformer(str(path), device="cpu")
    for name in ("query", None):
        wanted = judge.encode(TEXTS[:3], prompt_name=name)
        found = vectors(engine, text, TEXTS[:3], prompt_name=name)
        assert np.abs(found - wanted).max() < TOLERANCE
    with pytest.raises(InvalidJob, match=r"prompt_name: 'no' is not known; known: other, query"):
        vectors(engine, text, TEXTS[:1], prompt_name="no")


def test_the_pooler_can_be_another(sentences: Callable[[Kind], Path]) -> None:
    path = sentences(EMBEDDERS["bert"])
    asked = PoolerConfig(pooling_type="CLS", use_activation=False)
    found = vectors(engine_of(path, pooler_config=asked), ModelTokenizer(path), TEXTS[:3])
    judge = SentenceTransformer(str(path), device="cpu")
    wanted = [each[0].numpy() for each in judge.encode(TEXTS[:3], output_value="token_embeddings")]
    assert np.abs(found - np.array(wanted)).max() < TOLERANCE


def test_a_job_may_ask_for_what_the_pooler_does_not_give(sentences: Callable[[Kind], Path]) -> None:
    path = sentences(CLASSIFIERS["bert"])
    text, texts = ModelTokenizer(path), TEXTS[:3]
    raw = engine_of(path, pooler_config=PoolerConfig(use_activation=False))
    asked, logits = engine_of(path), logits_of(path, texts)
    assert np.abs(vectors(raw, text, texts) - logits).max() < TOLERANCE
    found = vectors(raw, text, texts, use_activation=True)
    assert np.abs(found - vectors(asked, text, texts)).max() < TOLERANCE


@pytest.mark.parametrize("fields", [{"dtype": "bfloat16"}, {"quantization": "int8"}])
def test_fewer_bits_are_near(fields: dict[str, object], tmp_path: Path) -> None:
    bert = EMBEDDERS["bert"]
    wide = bert.fields | {"hidden_size": 64, "intermediate_size": 128}
    path = sentence_folders.save(replace(bert, fields=wide), tmp_path / "m")
    text = ModelTokenizer(path)
    wanted = vectors(engine_of(path), text, TEXTS)
    found = vectors(engine_of(path, **fields), text, TEXTS)
    cosines = (found * wanted).sum(1)
    assert cosines.min() > 0.99 and np.abs(found - wanted).max() > 0


@pytest.mark.parametrize(
    ("name", "value"),
    [("model_impl", "native"), ("kv_cache_memory_bytes", 2**20), ("async_scheduling", True)],
)
def test_a_setting_that_vectors_do_not_obey_is_refused(
    name: str, value: object, sentences: Callable[[Kind], Path]
) -> None:
    with pytest.raises(InvalidJob, match=f"{name}: a model that makes vectors does not obey it"):
        LLM(str(sentences(EMBEDDERS["bert"])), **{name: value})


def test_a_pooler_of_a_model_of_text_is_refused() -> None:
    with pytest.raises(InvalidJob, match="pooler_config: a model of text does not obey it"):
        LLM(str(BUNDLED_MODEL), pooler_config={"pooling_type": "CLS"})


def test_another_pooling_is_another_model(tmp_path: Path) -> None:
    path = sentence_folders.save(EMBEDDERS["bert"], tmp_path / "m")
    settings = WorkerSettings(model=str(path), redis_url="redis://x")
    before = fingerprint(settings)
    (path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "cls"}))
    assert fingerprint(settings) != before


def test_padding_that_changes_numbers_is_noticed(sentences: Callable[[Kind], Path]) -> None:
    model = load_pooling_model(ModelSpec(sentences(EMBEDDERS["bert"])))
    module = model._module
    assert model._pads_exactly()
    forward = module.forward
    module.forward = lambda attention_mask=None, **given: forward(**given)
    assert not model._pads_exactly()


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("type", "sentence_transformers.models.LSTM", "module 1 is not served"),
        ("type", "sentence_transformers.models.Normalize", "module 1 is not served"),
        ("path", "nowhere", "nowhere/config.json: No such file"),
    ],
)
def test_a_folder_with_parts_that_are_not_served_is_refused(
    field: str, value: str, said: str, tmp_path: Path
) -> None:
    path = sentence_folders.save(EMBEDDERS["bert"], tmp_path / "m")
    modules = json.loads((path / "modules.json").read_text())
    modules[1][field] = value
    (path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ModelError, match=said):
        engine_of(path)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"pooling_mode": "median"}, "'median'; known are cls, mean"),
        ({"pooling_mode": 3}, "pooling_mode is 3"),
        ({"pooling_mode": ["cls", "no"]}, "pooling_mode"),
        ({"pooling_mode": "cls", "include_prompt": False}, "include_prompt"),
    ],
)
def test_pooling_that_is_not_known_is_refused(
    fields: dict[str, object], said: str, tmp_path: Path
) -> None:
    path = sentence_folders.save(EMBEDDERS["bert"], tmp_path / "m")
    (path / "1_Pooling" / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ModelError, match=said):
        read_sentence_folder(path)


def test_a_classifier_without_its_head_is_refused(tmp_path: Path) -> None:
    path = sentence_folders.save(EMBEDDERS["plain"], tmp_path / "m")
    fields = json.loads((path / "config.json").read_text())
    fields["architectures"] = ["BertForSequenceClassification"]
    (path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ModelError, match=r"tensor classifier\.bias is missing"):
        engine_of(path)


def test_a_folder_tells_what_it_is_for(sentences: Callable[[Kind], Path], tmp_path: Path) -> None:
    assert all(pools(sentences(kind)) for kind in (*EMBEDDERS.values(), *CLASSIFIERS.values()))
    named = {"GPT2LMHeadModel": False, "LlamaForCausalLM": False, "BertForMaskedLM": True}
    for name, is_one in named.items():
        (tmp_path / "config.json").write_text(json.dumps({"architectures": [name]}))
        assert pools(tmp_path) is is_one
        asked = WorkerSettings(model=str(tmp_path), redis_url="redis://x", runner="generate")
        assert not asked.pools


def test_what_a_model_cannot_do_is_refused(sentences: Callable[[Kind], Path]) -> None:
    engine = engine_of(sentences(EMBEDDERS["bert"]))
    check, none = engine.limits.check, Job(job_id="", model="", prompts=["x"]).params
    embed, length = PoolingParams(task="embed"), engine.limits.max_model_len

    def error(
        ids: list[int], pooling: PoolingParams | None, split: int = 0
    ) -> PenstockError | None:
        return check(AddSequence("", ids, none, pooling=pooling, split=split))

    assert error([1] * length, embed) is None
    assert isinstance(error([1] * (length + 1), embed), InputTooLong)
    assert error([1] * 2 * length, PoolingParams(task="score"), split=length) is None
    assert isinstance(error([1] * 2 * length, PoolingParams(), split=length - 1), InputTooLong)
    assert isinstance(error([1, 2], None), UnsupportedTask)
    for wrong, said in (([], "no tokens"), ([204], "input: token id 204")):
        refused = error(wrong, embed)
        assert refused is not None and said in refused.message
    refused = error([1], PoolingParams(dimensions=33))
    assert refused is not None and "have 32" in refused.message
    # What the I/O side lets pass although it should not ends that sequence alone.
    engine.add(AddSequence("bad", [204], none, pooling=embed))
    engine.add(AddSequence("good", [5], none, pooling=embed))
    bad, good = sorted(run(engine), key=lambda each: each.seq_id)
    assert bad.error is not None and not bad.token_ids and good.vector is not None


def test_steps_go_by_turns_and_tokens(sentences: Callable[[Kind], Path]) -> None:
    engine, embed = engine_of(sentences(EMBEDDERS["bert"]), max_num_seqs=4), PoolingParams()
    none = Job(job_id="", model="", prompts=["x"]).params
    steps = list[list[str]]()
    engine.note_plan = lambda rows: steps.append([seq_id for seq_id, _, _ in rows])

    def add(seq_id: str, count: int, priority: int = 1, turn: int = 0) -> None:
        ids = [*range(3, 3 + count)]
        engine.add(AddSequence(seq_id, ids, none, pooling=embed, priority=priority, turn=turn))

    engine.step_tokens = 50
    for number in range(6):
        add(f"late{number}", 10, turn=5)
    add("early", 45, turn=1)
    add("urgent", 10, priority=0, turn=9)
    add("gone", 10, turn=0)
    engine.cancel("gone")
    outputs = run(engine)
    assert steps == [["urgent"], ["early"], [f"late{n}" for n in range(4)], ["late4", "late5"]]
    assert len(outputs) == 8 and engine.stats().num_steps == 4
    assert engine.stats().generation_tokens == 8 and engine.stats().computed_tokens == 115
    add("huge", 100)  # more than a step has
    assert [each.seq_id for each in run(engine)] == ["huge"]


def test_a_text_that_several_ask_for_is_read_once(sentences: Callable[[Kind], Path]) -> None:
    engine = engine_of(sentences(EMBEDDERS["bert"]))
    seen, group = list[int](), engine.model._group

    def counted(texts: Sequence[TextIds]) -> torch.Tensor:
        seen.append(len(texts))
        return group(texts)

    engine.model._group = counted  # type: ignore[method-assign]
    pooling = PoolingParams(task="score")
    none = Job(job_id="", model="", prompts=["x"]).params
    for number in range(5):
        ids = [7, 8, 9, 10 + number]
        engine.add(AddSequence(str(number), ids, none, pooling=pooling, split=3))
    assert len(run(engine)) == 5 and seen == [6]


def test_progress_is_seen_within_a_step(sentences: Callable[[Kind], Path]) -> None:
    engine = engine_of(sentences(EMBEDDERS["modernbert"]))
    none = Job(job_id="", model="", prompts=["x"]).params
    engine.add(AddSequence("", [5, 6], none, pooling=PoolingParams()))
    before = engine.num_steps
    run(engine)
    assert engine.num_steps - before == 3  # two layers, and the step


def test_the_class_llm_makes_vectors(sentences: Callable[[Kind], Path]) -> None:
    paths = [sentences(each) for each in (EMBEDDERS["bert"], CLASSIFIERS["reranker"])]
    embedder, reranker = (LLM(str(path), max_num_batched_tokens=64) for path in paths)
    judge = SentenceTransformer(str(paths[0]), device="cpu")
    wanted = judge.encode(TEXTS[:5])
    found = embedder.embed(TEXTS[:5], use_tqdm=False)
    assert np.abs(np.array([each.outputs.embedding for each in found]) - wanted).max() < TOLERANCE
    ids = embedder.embed({"prompt_token_ids": found[0].prompt_token_ids})[0]
    assert np.allclose(ids.outputs.embedding, found[0].outputs.embedding, atol=1e-5)
    short = embedder.embed("fox", pooling_params=PoolingParams(dimensions=3))
    assert len(short[0].outputs.embedding) == 3
    scores = [each.outputs.score for each in embedder.score(QUERY, TEXTS[:4], use_tqdm=False)]
    close = judge.similarity(judge.encode([QUERY]), judge.encode(TEXTS[:4]))[0].numpy()
    assert np.abs(np.array(scores) - close).max() < TOLERANCE
    ranks = reranker.score([QUERY, "fox"], TEXTS[:2], use_tqdm=False)
    pairs = [(QUERY, TEXTS[0]), ("fox", TEXTS[1])]
    wanted = CrossEncoder(str(paths[1]), device="cpu").predict(pairs)
    assert np.abs(np.array([each.outputs.score for each in ranks]) - wanted).max() < TOLERANCE
    assert len(reranker.classify(TEXTS[:2])[1].outputs.probs) == 1
    empty = embedder.embed(["", "fox"], use_tqdm=False)[0].outputs.embedding
    assert np.abs(np.array(empty) - judge.encode("")).max() < TOLERANCE
    assert len(reranker.score("fox", ["", "dog"], use_tqdm=False)) == 2
    with pytest.raises(UnsupportedTask, match="generate is no task of this model"):
        embedder.generate("x")
    with pytest.raises(InputTooLong):
        embedder.embed(LONG)
    with pytest.raises(InvalidJob, match="data_1: give one text, or 3"):
        embedder.score(["a", "b"], TEXTS[:3])


def test_texts_are_grouped_by_length() -> None:
    lengths = [500, 10, 490, 9, 10, 300, 260, 8]
    groups = like_lengths(lengths)
    assert groups == [[0, 2], [5, 6], [1, 4, 3, 7]]
    assert like_lengths([3, 200, 5]) == [[1, 2, 0]]  # so few that padding costs less


def test_numbers_survive_base64() -> None:
    numbers = [0.0, -1.5, 3.0e38, 1e-40]
    packed = np.array(numbers, "<f4").tobytes()
    assert from_base64(to_base64(packed)) == np.array(numbers, np.float32).tolist()

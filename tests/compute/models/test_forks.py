"""Several answers to one prompt: it is computed once, and its blocks are held by all of them."""

from pathlib import Path

import pytest

import families
import judges
from penstock.schemas.params.sampling import SamplingParams
from penstock.worker.engine.build import build_engine
from penstock.worker.engine.engine import Engine
from penstock.worker.engine.io.config import EngineConfig
from penstock.worker.engine.io.messages import AddSequence, Output

FAMILIES = ("llama", "deepseek_v3", "qwen3_next", "gpt_oss")  # latents, states, windows


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("families")
    for family in FAMILIES:
        families.save(family, root / family)
    return root


def engine_of(folder: Path, **settings: object) -> Engine:
    given = {"dtype": "float32", "hf_overrides": {"max_position_embeddings": 1024}}
    given |= {"max_model_len": 1024, "num_gpu_blocks_override": 400}
    return build_engine(EngineConfig(model=folder, **{**given, "max_num_seqs": 16, **settings}))


def answers(
    engine: Engine, prompt: list[int], params: SamplingParams, group: str
) -> list[list[Output]]:
    for choice in range(params.n):
        engine.add(AddSequence(str(choice), prompt, params, seed=7, choice=choice, group=group))
    found: list[list[Output]] = [[] for _ in range(params.n)]
    while engine.busy:
        for output in engine.step():
            assert output.error is None, output.error
            found[int(output.seq_id)].append(output)
    return found


def token_ids(found: list[list[Output]]) -> list[list[int]]:
    return [[token for output in outputs for token in output.token_ids] for outputs in found]


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.slow
def test_each_says_what_it_says_alone(root: Path, family: str, caching: bool) -> None:
    params = SamplingParams(n=5, max_tokens=20, temperature=1, ignore_eos=True, prompt_logprobs=1)
    for length in (1, 5, 16, 17, 50):
        prompt = judges.prompt(length, length)
        made = []
        for group in ("", "one"):
            engine = engine_of(
                root / family, enable_prefix_caching=caching, max_num_batched_tokens=24
            )
            found = answers(engine, prompt, params, group)
            made.append(token_ids(found))
            assert engine.stats().forked_sequences == (4 if group else 0)
            scores = [outputs[0].prompt_logprobs for outputs in found]
            assert all(each is not None and len(each) == length - 1 for each in scores)
            assert all([one.token_id for one in each] == prompt[1:] for each in scores if each)
            assert engine.scheduler.pool.num_held == engine.scheduler.pool.num_shared == 0
        assert made[0] == made[1] and len({tuple(each) for each in made[1]}) > 1
        # One computes the prompt, and each the tokens that it has made but its last.
        assert engine.stats().computed_tokens == length + 5 * 19


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("length, num_tails", [(512, 0), (500, 7)])
def test_eight_answers_to_a_long_prompt_hold_it_once(
    root: Path, length: int, num_tails: int, caching: bool
) -> None:
    engine = engine_of(root / "llama", enable_prefix_caching=caching)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    for choice in range(8):
        engine.add(
            AddSequence(str(choice), judges.prompt(length), params, choice=choice, group="a")
        )
    engine.step()
    held, shared = engine.stats().num_held_blocks, engine.stats().num_shared_blocks
    assert (held, held + shared) == (32 + num_tails, 8 * 32)
    assert shared / (held + shared) > 0.55
    engine.step()
    assert engine.stats().num_held_blocks == 32 + (num_tails or 8)


def test_who_finds_no_room_beside_its_leader_comes_later(root: Path) -> None:
    params = SamplingParams(n=9, max_tokens=6, temperature=1, ignore_eos=True)
    prompt = judges.prompt(40)
    wide, narrow = engine_of(root / "llama"), engine_of(root / "llama", max_num_seqs=4)
    made = token_ids(answers(narrow, prompt, params, "a"))
    assert made == token_ids(answers(wide, prompt, params, "a"))
    assert narrow.stats().forked_sequences >= 3 and wide.stats().forked_sequences == 8


def test_a_leader_that_is_cancelled_leaves_the_prompt_to_another(root: Path) -> None:
    engine = engine_of(root / "llama", max_num_batched_tokens=16)
    params = SamplingParams(max_tokens=4, temperature=1, ignore_eos=True)
    for choice in range(4):
        engine.add(AddSequence(str(choice), judges.prompt(60), params, choice=choice, group="a"))
    engine.step()
    engine.cancel("0")
    found: dict[str, int] = {}
    while engine.busy:
        for output in engine.step():
            assert output.error is None
            found[output.seq_id] = found.get(output.seq_id, 0) + len(output.token_ids)
    assert found == {"1": 4, "2": 4, "3": 4}
    assert engine.stats().forked_sequences == 2

"""Compares lm-eval's numbers over HTTP with those of its own `hf` backend, on tasks made here.

    python -m clients.scores PYTHON

PYTHON is that of an environment with `lm-eval[hf,api]`. Both compute the bundled model in float32.
Over HTTP each text is scored twice, with one and with eight requests at once.
"""

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from penstock.compose.server import Server
from penstock.worker.bundled.paths import BUNDLED_MODEL
from stage import GatewayProcess
from worker_process import WorkerProcess

TOLERANCE = 1e-3  # of a text's log probability, which is a sum over up to 500 tokens
WORDS = ["sun", "moon", "river", "bread", "stone", "garden", "lamp", "window", "horse", "paper"]
TASK = """\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/{name}.jsonl}}}}
test_split: test
output_type: {kind}
doc_to_text: "{text}"
doc_to_target: "{target}"
metric_list: [{{metric: {metric}}}]
"""
_TOKENS = "max_length=512,add_bos_token=True"


def main(python: str) -> int:
    with TemporaryDirectory() as temporary, Server() as server:
        folder = Path(temporary)
        make_tasks(folder)
        expected = scores(
            python, folder, "hf", f"pretrained={BUNDLED_MODEL},dtype=float32,prefix_token_id=1"
        )
        worst = 0.0
        for num_concurrent in (1, 8):
            with (
                WorkerProcess(server.url, BUNDLED_MODEL, "--dtype", "float32").ready(),
                GatewayProcess(server.url) as gateway,
            ):
                for cache in ("cold", "warm"):
                    told = scores(
                        python,
                        folder,
                        "local-completions",
                        f"model={BUNDLED_MODEL.name},base_url={gateway.url}/v1/completions,"
                        f"tokenizer={BUNDLED_MODEL},custom_prefix_token_id=1,"
                        f"num_concurrent={num_concurrent}",
                    )
                    assert told.keys() == expected.keys()
                    apart = max(abs(told[each] - expected[each]) for each in expected)
                    worst = max(worst, apart)
                    print(
                        f"{len(told)} texts, {num_concurrent} at once, {cache} cache: at most "
                        f"{apart:.1e} from the hf backend"
                    )
    return int(worst > TOLERANCE)


def make_tasks(folder: Path) -> None:
    """Write a task of choices, and one of whole texts."""
    choices = TASK + 'doc_to_choice: "{{{{choices}}}}"\n'
    kinds = (
        ("choices", "multiple_choice", choices, "{{question}}", "{{gold}}", "acc"),
        ("texts", "loglikelihood_rolling", TASK, "", "{{text}}", "bits_per_byte"),
    )
    rng = random.Random(5)
    for name, kind, task, text, target, metric in kinds:
        filled = task.format(
            name=name, folder=folder, kind=kind, text=text, target=target, metric=metric
        )
        (folder / f"{name}.yaml").write_text(filled)
        lines = _choices(rng) if name == "choices" else _texts(rng)
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in lines))


def scores(python: str, folder: Path, backend: str, args: str) -> dict[str, float]:
    """Return the log probability of each text that lm-eval asked for."""
    out = folder / "samples"
    subprocess.run(
        [
            python, "-m", "lm_eval", "run", "--model", backend, "--model_args", f"{args},{_TOKENS}",
            "--include_path", folder, "--tasks", "choices,texts", "--device", "cpu",
            "--log_samples", "--output_path", out,
        ],
        check=True,
        capture_output=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"},
    )  # fmt: skip
    found = {}
    for name in ("choices", "texts"):
        (path,) = out.rglob(f"samples_{name}_*.jsonl")
        for line in path.read_text().splitlines():
            sample = json.loads(line)
            for number, (answer,) in enumerate(sample["resps"]):
                value = answer[0] if isinstance(answer, list) else answer
                found[f"{name} {sample['doc_id']} {number}"] = float(value)
        path.unlink()
    return found


def _choices(rng: random.Random) -> Iterator[dict[str, object]]:
    for number in range(60):
        first, second, third, other = rng.sample(WORDS, 4)
        question = f"{number}: The {first} and the {second} are near the {third}. Which is first?"
        yield {"question": question, "choices": [first, second, other], "gold": 0}


def _texts(rng: random.Random) -> Iterator[dict[str, object]]:
    for count in (3, 10, 40) * 10:
        text = " ".join(
            f"The {rng.choice(WORDS)} is by the {rng.choice(WORDS)}." for _ in range(count)
        )
        yield {"text": text}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

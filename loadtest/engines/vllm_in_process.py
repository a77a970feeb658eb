"""vLLM's engine in process, in an environment of its own.

    PYTHON vllm_in_process.py < task

The task is JSON: `model`, a folder; `concurrency`; `requests`, each `prompt`, a text or ids, and
`max_tokens`. A line of JSON says when each token of each request came, by the machine's clock. Of
this project it imports nothing, and needs nothing but vLLM.
"""

import json
import os
import sys
import time
from typing import Any


def main() -> int:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM's own words
    task = json.load(sys.stdin)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{(os.cpu_count() or 1) - 1}")
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=task["model"],
            dtype="bfloat16",
            max_model_len=6000,
            max_num_seqs=task["concurrency"],
            kv_cache_memory_bytes=2 * 2**30,
        )
    )
    first = _answer(engine, [{"prompt": task["requests"][0]["prompt"][::-1][:16], "max_tokens": 4}])
    answer = _answer(engine, task["requests"])
    out.write(json.dumps(answer | {"first_token_s": first["tokens_s"][0][0]}) + "\n")
    out.flush()
    return 0


def _answer(engine: Any, requests: list[dict[str, Any]]) -> dict[str, Any]:
    """Answer requests that are handed over at once."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    tokens_s: list[list[float]] = [[] for _ in requests]
    num_prompt = [0] * len(requests)
    cpu_s, begin_s = time.process_time(), time.perf_counter()
    for number, request in enumerate(requests):
        prompt = request["prompt"]
        params = SamplingParams(
            temperature=0,
            max_tokens=request["max_tokens"],
            ignore_eos=True,
            output_kind=RequestOutputKind.DELTA,
        )
        vllm_prompt = {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt}
        engine.add_request(str(number), engine.renderer.render_cmpl([vllm_prompt])[0], params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            number, count = int(output.request_id), len(output.outputs[0].token_ids)
            tokens_s[number] += [time.perf_counter()] * count
            num_prompt[number] = len(output.prompt_token_ids)
    return {
        "begin_s": begin_s,
        "wall_s": time.perf_counter() - begin_s,
        "cpu_s": time.process_time() - cpu_s,
        "num_prompt": num_prompt,
        "tokens_s": tokens_s,
    }


if __name__ == "__main__":
    sys.exit(main())

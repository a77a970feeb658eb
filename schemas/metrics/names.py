"""The names of metrics: TTFT, ITL, TPOT, depth of the queue, KV cache usage and the rest.

Dashboards written for vLLM work on its names; ours are beside them.
"""

from dataclasses import dataclass
from typing import Literal

from penstock.schemas.delivery import Total
from penstock.schemas.metrics.tally import Tally

TTFT_SECONDS = "vllm:time_to_first_token_seconds"
INTER_TOKEN_SECONDS = "vllm:inter_token_latency_seconds"
E2E_SECONDS = "vllm:e2e_request_latency_seconds"
REQUEST_SUCCESS = "vllm:request_success"
REQUESTS_RUNNING = "vllm:num_requests_running"
REQUESTS_WAITING = "vllm:num_requests_waiting"
REQUESTS_WAITING_BY_REASON = "vllm:num_requests_waiting_by_reason"
ENGINE_HEALTHY = "vllm:engine_healthy"
KV_USAGE = "vllm:kv_cache_usage_perc"
KV_WASTE = "penstock:kv_waste_ratio"
CACHE_CONFIG = "vllm:cache_config_info"
PROMPT_TOKENS_BY_SOURCE = "vllm:prompt_tokens_by_source"
ADMISSION_REJECTIONS = "vllm:admission_rejections"

JOBS_ENDED = "penstock:jobs_ended"
JOBS_QUEUED = "penstock:jobs_queued"
JOBS_RUNNING = "penstock:jobs_running"
NUM_QUEUED_TOKENS = "penstock:num_queued_tokens"
HTTP_RESPONSES = "penstock:http_responses"
JOBS_FOLLOWED = "penstock:jobs_followed"
WORKERS_ALIVE = "penstock:workers_alive"
LANE_WORKERS = "penstock:lane_workers"
WORKERS_WANTED = "penstock:workers_wanted"
QUEUE_REACHABLE = "penstock:queue_reachable"
HOUSEKEEPING_ALIVE = "penstock:housekeeping_alive"
OLDEST_WAITING_SECONDS = "penstock:oldest_waiting_seconds"
IGNORED_PARAMETERS = "penstock:ignored_parameters"
RECONNECTS = "penstock:reconnects"
REPLAYED_EVENTS = "penstock:replayed_events"
WEBHOOK_ATTEMPTS = "penstock:webhook_attempts"
TENANT_TOKENS = "penstock:tenant_tokens"
OTHER_TENANTS = "other"
DEAD_LETTERS = "penstock:dead_letters"
UNHEALTHY_S = 10.0  # without a step for so long, with work to do

# Totals of a lane, as its scripts count them: the metric's name and help.
LANE_TOTALS: dict[Total, tuple[str, str]] = {
    "crashed": ("penstock:worker_crashes", "Workers that crashed or were ended for standing still"),
    "lapsed": ("penstock:worker_lapses", "Workers whose lease ran out"),
    "reaped": ("penstock:jobs_reaped", "Jobs taken from workers that crashed or lapsed"),
    "requeued": ("penstock:jobs_requeued", "Jobs put back into the queue, for whatever reason"),
    "buried": ("penstock:jobs_dead", "Jobs given up because workers died of them"),
}

# vLLM's buckets, in seconds.
TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
INTER_TOKEN_BUCKETS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
E2E_BUCKETS = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
TOKENS_BUCKETS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
STEP_TOKENS_BUCKETS = (1, 8, *(2**power for power in range(4, 15)))
N_BUCKETS = (1, 2, 5, 10, 20)
PREEMPTIONS_BUCKETS = (1, 2, 3, 4, 5, 10, 20)
# Ours, in seconds.
COMMIT_BUCKETS = (
    0.0005,
    0.001,
    0.002,
    0.004,
    0.008,
    0.016,
    0.032,
    0.064,
    0.128,
    0.256,
    0.512,
    1,
    2,
)
COMPILE_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)


@dataclass(frozen=True, slots=True)
class EngineMetric:
    """One number of a worker's statistics, as it is published."""

    stat: str
    name: str
    kind: Literal["gauge", "counter"]
    text: str


ENGINE_METRICS = (
    EngineMetric("num_running", REQUESTS_RUNNING, "gauge", "Sequences in the running batch"),
    EngineMetric(
        "num_waiting", REQUESTS_WAITING, "gauge", "Requests that wait: in an engine or in the queue"
    ),
    EngineMetric("num_preemptions", "vllm:num_preemptions", "counter", "Preemptions"),
    EngineMetric(
        "prompt_tokens",
        "vllm:prefix_cache_queries",
        "counter",
        "Tokens looked up in the prefix cache",
    ),
    EngineMetric(
        "cached_tokens", "vllm:prefix_cache_hits", "counter", "Tokens found in the prefix cache"
    ),
    EngineMetric(
        "computed_tokens",
        "penstock:computed_tokens",
        "counter",
        "Tokens that went through the model",
    ),
    EngineMetric(
        "recomputed_tokens",
        "penstock:recomputed_tokens",
        "counter",
        "Tokens computed again, after a preemption or another worker's attempt",
    ),
    EngineMetric(
        "resumed_tokens",
        "penstock:resumed_tokens",
        "counter",
        "Tokens that another attempt had made of jobs that were gone on with",
    ),
    EngineMetric(
        "fenced_writes",
        "penstock:fenced_writes",
        "counter",
        "Writes refused, since the job was another worker's by then or had ended",
    ),
    EngineMetric(
        "grammar_cache_hits",
        "penstock:grammar_cache_hits",
        "counter",
        "Sequences whose grammar was compiled already",
    ),
    EngineMetric("num_steps", "penstock:engine_steps", "counter", "Engine steps"),
    EngineMetric(
        "unmoved_s",
        "penstock:engine_unmoved_seconds",
        "gauge",
        "Since it was heard, and computed if it has work",
    ),
    EngineMetric("step_seconds", "penstock:step_seconds", "counter", "Time in engine steps"),
    EngineMetric(
        "scheduler_seconds",
        "penstock:scheduler_seconds",
        "counter",
        "Time of engine steps in the scheduler",
    ),
    EngineMetric(
        "max_num_batched_tokens", "penstock:max_step_tokens", "gauge", "Tokens of a step, at most"
    ),
    EngineMetric("num_blocks", "penstock:kv_blocks", "gauge", "KV blocks"),
    EngineMetric(
        "num_held_blocks", "penstock:kv_held_blocks", "gauge", "KV blocks that a sequence holds"
    ),
    EngineMetric(
        "num_shared_blocks",
        "penstock:kv_shared_blocks",
        "gauge",
        "KV blocks more that sequences would hold, were none held by several",
    ),
    EngineMetric(
        "forked_sequences",
        "penstock:forked_sequences",
        "counter",
        "Sequences that went on from a prompt which another of their job had computed",
    ),
    EngineMetric(
        "num_cached_blocks",
        "penstock:kv_cached_blocks",
        "gauge",
        "KV blocks kept for their prefix alone",
    ),
    EngineMetric(
        "num_live_slots",
        "penstock:kv_live_slots",
        "gauge",
        "Slots of held blocks that hold a token",
    ),
)


# Of one model's jobs, at one worker.
MODEL_METRICS = (
    EngineMetric(
        "prompt_tokens", "vllm:prompt_tokens", "counter", "Tokens of prompts, each prompt once"
    ),
    EngineMetric(
        "cached_tokens",
        "vllm:prompt_tokens_cached",
        "counter",
        "Tokens of prompts that were found in the prefix cache",
    ),
    EngineMetric("generation_tokens", "vllm:generation_tokens", "counter", "Tokens generated"),
)


@dataclass(frozen=True, slots=True)
class EngineHistogram:
    """One histogram of a worker's statistics, as it is published.

    Workers and gateways of two versions may run side by side, so who changes the bounds gives
    `stat` another name.
    """

    stat: str
    name: str
    text: str
    bounds: tuple[float, ...]

    def tally(self) -> Tally:
        return Tally(self.bounds)


JOB_HISTOGRAMS = (
    EngineHistogram(
        "ttft_seconds",
        TTFT_SECONDS,
        "From a job's submission to its first tokens; not of jobs that were delayed",
        TTFT_BUCKETS,
    ),
    EngineHistogram(
        "inter_token_seconds",
        INTER_TOKEN_SECONDS,
        "Between two events of a choice",
        INTER_TOKEN_BUCKETS,
    ),
    EngineHistogram(
        "e2e_seconds",
        E2E_SECONDS,
        "From a job's submission to its end; not of jobs that were delayed",
        E2E_BUCKETS,
    ),
    EngineHistogram(
        "queue_seconds",
        "vllm:request_queue_time_seconds",
        "From a job's submission to the engine; not of jobs that were delayed or gone on with",
        E2E_BUCKETS,
    ),
    EngineHistogram(
        "prefill_seconds",
        "vllm:request_prefill_time_seconds",
        "From the engine to a job's first token",
        E2E_BUCKETS,
    ),
    EngineHistogram(
        "decode_seconds",
        "vllm:request_decode_time_seconds",
        "From a job's first token to its last",
        E2E_BUCKETS,
    ),
    EngineHistogram(
        "inference_seconds",
        "vllm:request_inference_time_seconds",
        "From the engine to a job's last token",
        E2E_BUCKETS,
    ),
    EngineHistogram(
        "output_token_seconds",
        "vllm:request_time_per_output_token_seconds",
        "Time of decoding for each token after the first, of a job's longest choice",
        INTER_TOKEN_BUCKETS,
    ),
    EngineHistogram(
        "request_prompt_tokens",
        "vllm:request_prompt_tokens",
        "Tokens of a prompt",
        TOKENS_BUCKETS,
    ),
    EngineHistogram(
        "request_generation_tokens",
        "vllm:request_generation_tokens",
        "Tokens of a choice",
        TOKENS_BUCKETS,
    ),
    EngineHistogram(
        "max_generation_tokens",
        "vllm:request_max_num_generation_tokens",
        "Tokens of a job's longest choice",
        TOKENS_BUCKETS,
    ),
    EngineHistogram(
        "params_n", "vllm:request_params_n", "Choices asked for each prompt", N_BUCKETS
    ),
    EngineHistogram(
        "params_max_tokens",
        "vllm:request_params_max_tokens",
        "max_tokens of a job, where it is given",
        TOKENS_BUCKETS,
    ),
)

COMMIT_SECONDS = EngineHistogram(
    "commit_seconds",
    "penstock:commit_seconds",
    "From a worker's commit of a step to Redis's answer",
    COMMIT_BUCKETS,
)

STEP_HISTOGRAMS = (
    EngineHistogram(
        "step_tokens",
        "vllm:iteration_tokens_total",
        "Tokens that a step computes",
        STEP_TOKENS_BUCKETS,
    ),
    EngineHistogram(
        "request_preemptions",
        "vllm:request_num_preemptions",
        "Preemptions of a sequence",
        PREEMPTIONS_BUCKETS,
    ),
    EngineHistogram(
        "prefill_computed_tokens",
        "vllm:request_prefill_kv_computed_tokens",
        "Tokens of a sequence's prompt that were not found in the prefix cache",
        TOKENS_BUCKETS,
    ),
    EngineHistogram(
        "compile_seconds",
        "penstock:grammar_compile_seconds",
        "Time to compile a grammar, or to find that it cannot be",
        COMPILE_BUCKETS,
    ),
)

ENGINE_HISTOGRAMS = (COMMIT_SECONDS, *STEP_HISTOGRAMS)

"""The names of metrics. Dashboards written for vLLM work on its names; ours are beside them."""

from dataclasses import dataclass
from typing import Literal

from penstock.schemas.delivery import Total

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

JOBS_ENDED = "penstock:jobs_ended"
JOBS_QUEUED = "penstock:jobs_queued"
JOBS_RUNNING = "penstock:jobs_running"
NUM_QUEUED_TOKENS = "penstock:num_queued_tokens"
HTTP_RESPONSES = "penstock:http_responses"
JOBS_FOLLOWED = "penstock:jobs_followed"
WORKERS_ALIVE = "penstock:workers_alive"
QUEUE_REACHABLE = "penstock:queue_reachable"
HOUSEKEEPING_ALIVE = "penstock:housekeeping_alive"
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


@dataclass(frozen=True, slots=True)
class EngineMetric:
    """One number of an engine's statistics, as it is published."""

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
        "prompt_tokens", "vllm:prompt_tokens", "counter", "Prompt tokens of admitted sequences"
    ),
    EngineMetric(
        "cached_tokens",
        "vllm:prompt_tokens_cached",
        "counter",
        "Prompt tokens found in the prefix cache",
    ),
    EngineMetric(
        "prompt_tokens",
        "vllm:prefix_cache_queries",
        "counter",
        "Tokens looked up in the prefix cache",
    ),
    EngineMetric(
        "cached_tokens", "vllm:prefix_cache_hits", "counter", "Tokens found in the prefix cache"
    ),
    EngineMetric("generation_tokens", "vllm:generation_tokens", "counter", "Tokens generated"),
    EngineMetric(
        "computed_tokens",
        "penstock:computed_tokens",
        "counter",
        "Tokens that went through the model",
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

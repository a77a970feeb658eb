"""The settings of all commands, since a file or an environment may hold those of several.

A name that no command knows is a typing error and would have no effect, so it is refused by name.
"""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence

PREFIX = "PENSTOCK_"
NAMES = frozenset(
    {
        "after",
        "allowed_hosts",
        "allowed_origins",
        "apart",
        "api_key",
        "async_scheduling",
        "attention_backend",
        "backend",
        "base_url",
        "batch_size",
        "batch_window",
        "before",
        "block_size",
        "body_timeout_s",
        "burstiness",
        "cache_salt_secret",
        "chat_template",
        "chat_template_content_format",
        "chores_redis_url",
        "chosen",
        "concurrencies",
        "config",
        "conversations_kept_s",
        "crash_dump_folder",
        "dataset_name",
        "dataset_path",
        "depths",
        "deterministic",
        "device",
        "disable_fastapi_docs",
        "documents",
        "drain_s",
        "dtype",
        "durability",
        "enable_force_include_usage",
        "enable_per_request_metrics",
        "enable_prefix_caching",
        "enable_tokenizer_info_endpoint",
        "endpoint",
        "enforce_eager",
        "engine",
        "engine_api_key",
        "engine_args",
        "engine_model",
        "engine_url",
        "engines",
        "every_s",
        "experts",
        "expires",
        "fake_poison",
        "fake_stamps",
        "fake_step_ms",
        "fd",
        "files_folder",
        "files_kept_s",
        "files_quota",
        "files_url",
        "folder",
        "fsync",
        "generation_config",
        "gguf",
        "goodput",
        "gpu_memory_utilization",
        "head_timeout_s",
        "hf_overrides",
        "host",
        "ignore_eos",
        "in_process",
        "input_file",
        "input_len",
        "into",
        "job_id",
        "json",
        "json_file",
        "keep_alive_s",
        "key_id",
        "kinds",
        "kv_cache_dtype",
        "kv_cache_memory_bytes",
        "kv_events_config",
        "lane",
        "lease_ttl_ms",
        "levels",
        "load_format",
        "log_format",
        "log_level",
        "max_body_bytes",
        "max_concurrency",
        "max_connections",
        "max_file_bytes",
        "max_model_len",
        "max_num_batched_tokens",
        "max_num_queued_reqs",
        "max_num_queued_tokens",
        "max_num_seqs",
        "max_open_reads",
        "max_priority",
        "max_queued",
        "max_running",
        "max_step_ms",
        "max_stored_bytes",
        "memory",
        "metric_percentiles",
        "metrics_max_tenants",
        "model",
        "model_fingerprint",
        "model_impl",
        "models_kept_days",
        "most",
        "name",
        "neighbour",
        "num_commands",
        "num_gpu_blocks_override",
        "num_iters",
        "num_iters_warmup",
        "num_lanes",
        "num_lines",
        "num_prompts",
        "num_seqs",
        "num_streams",
        "num_tenants",
        "num_tokens",
        "num_workers",
        "only",
        "open_metrics",
        "orphan_grace_ms",
        "otlp_traces_endpoint",
        "output",
        "output_file",
        "output_json",
        "output_len",
        "override_generation_config",
        "percentile_metrics",
        "ping_s",
        "plot",
        "pooler_config",
        "port",
        "priority_preemption_threshold",
        "quantization",
        "ramp_up_end_rps",
        "ramp_up_start_rps",
        "ramp_up_strategy",
        "ready_s",
        "reasoning_parser",
        "redis_6",
        "redis_at",
        "redis_url",
        "report",
        "request_rate",
        "request_rates",
        "requests_per_minute",
        "require_api_keys",
        "responses_kept_s",
        "result_dir",
        "result_filename",
        "results",
        "retry_failed",
        "return_tokens_as_token_ids",
        "revision",
        "root_path",
        "rounds",
        "runner",
        "sample",
        "save_detailed",
        "save_result",
        "scopes",
        "seed",
        "served_model_name",
        "server_secret",
        "server_secret_file",
        "shape",
        "shapes",
        "share_equal_jobs",
        "sleep_idle_s",
        "ssl_ca_certs",
        "ssl_certfile",
        "ssl_keyfile",
        "stall_timeout_s",
        "step_timeout_s",
        "steps",
        "temperature",
        "tenant",
        "to_knee",
        "tokenizer",
        "tokens_per_day",
        "tokens_per_minute",
        "tokens_per_month",
        "tool_call_parser",
        "trace_speed",
        "trust_remote_code",
        "trust_request_chat_template",
        "typical_len",
        "uds",
        "url",
        "vllm",
        "vocab_size",
        "webhook_max_attempts",
        "webhook_private",
        "webhook_public",
        "webhook_retry_s",
        "webhook_timeout_s",
        "weight",
        "worker",
    }
)
# Variables that are no settings, read from the environment alone; TEST and MUTANT are the tests'.
BESIDE = re.compile("SERVER|CRASH_(AT|MARK|GROUP)|(TEST|MUTANT)_.*")
# Kubernetes gives containers such variables for each service that is called `penstock-...`.
OF_A_SERVICE = re.compile(r".*SERVICE_(HOST|PORT\w*)=.*|.*PORT_\d+_[A-Z]+\w*=.*|.*_PORT=\w+://.*")


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """Return a sentence for each variable that has the prefix of a setting and is none."""
    sentences = []
    for variable, value in environment.items():
        name = variable.upper()
        rest = name.removeprefix(PREFIX)
        if rest == name or rest.lower() in NAMES or BESIDE.fullmatch(rest):
            continue
        if not OF_A_SERVICE.fullmatch(f"{rest}={value}"):
            meant = [PREFIX + each.upper() for each in nearest(rest.lower(), NAMES)]
            sentences.append(f"{variable} in the environment is no setting{did_you_mean(meant)}")
    return sentences


def unknown_keys(keys: Iterable[object]) -> list[str]:
    """Return a sentence for each key of a file that is no setting."""
    return [
        f"{key} is no setting{did_you_mean(nearest(str(key), NAMES))}"
        for key in keys
        if key not in NAMES
    ]


def nearest(name: str, names: Iterable[str]) -> list[str]:
    """Return the one name that was probably meant, or nothing where none is like it."""
    return difflib.get_close_matches(name.replace("-", "_"), sorted(names), 1)


def did_you_mean(names: Sequence[str]) -> str:
    return f": did you mean {names[0]}?" if names else ""

"""The page of what is refused says what the code does."""

import asyncio
import re

import pytest
from annotated_types import MaxLen
from pydantic import BaseModel

from paths import ROOT
from penstock.gateway.openai import validation as shape
from penstock.gateway.process.settings import GatewaySettings
from penstock.gateway.server import protocol
from penstock.gateway.webhooks.outbound import OutboundSettings
from penstock.schemas import job
from penstock.schemas.api import json_size
from penstock.schemas.delivery import Started
from penstock.schemas.errors import AnswerTooLarge, PenstockError
from penstock.schemas.job import Job
from penstock.schemas.params import sampling
from penstock.schemas.params.sampling import SamplingParams
from penstock.schemas.redis import script
from penstock.worker.engine.fake import fake_engine
from penstock.worker.engine.grammar import structured
from penstock.worker.engine.grammar.sandbox import SandboxLimits
from penstock.worker.jobs.consumer import Intake
from penstock.worker.process.sampling_defaults import Generation
from penstock.worker.process.settings import WorkerSettings
from penstock.worker.text.model_tokenizer import load_tokenizer

PAGE = ROOT / "docs" / "http.md"
ROW = re.compile(r"^\| (\w[^|]*) \| (\d+) \| (\d{3}|closed|tried again) \|$", re.MULTILINE)

ENDED = re.compile(
    r'"error":{"code":"(?P<code>\w+)","message":"[^"]*","status":(?P<status>\d+)'
    r'(,"retryable":(?P<retryable>\w+))?(,"reset_at":%d)?}'
)


def kinds(error: type[PenstockError]) -> set[type[PenstockError]]:
    """A class and all below it."""
    return {error}.union(*map(kinds, error.__subclasses__()))


def most(shape: type[BaseModel], name: str) -> int:
    """How many a field may hold."""
    [limit] = [
        each.max_length for each in shape.model_fields[name].metadata if isinstance(each, MaxLen)
    ]
    return limit


def of(settings: type[BaseModel], name: str) -> float:
    default: float = settings.model_fields[name].default
    return default


def test_the_page_says_what_the_code_does() -> None:
    tried = SandboxLimits()
    expected = {
        "head, bytes": protocol.MAX_HEAD_BYTES,
        "head, fields": protocol.MAX_HEADERS,
        "path and query, bytes": protocol.MAX_TARGET_BYTES,
        "seconds for the head": of(GatewaySettings, "head_timeout_s"),
        "seconds for the body": of(GatewaySettings, "body_timeout_s"),
        "seconds without taking anything of an answer": of(GatewaySettings, "stall_timeout_s"),
        "seconds without a request": of(GatewaySettings, "keep_alive_s"),
        "streams of one key, of jobs that other requests submitted": of(
            GatewaySettings, "max_open_reads"
        ),
        "connections": of(GatewaySettings, "max_connections"),
        "requests that wait on one connection": protocol.MAX_PIPELINED,
        "body, bytes": of(GatewaySettings, "max_body_bytes"),
        "body, values": json_size.MAX_VALUES,
        "body, lists and objects": json_size.MAX_GROUPS,
        "body, fields": json_size.MAX_NAMES,
        "body, fields of one object": shape.MAX_FIELDS,
        "body, nesting": shape.MAX_DEPTH,
        "messages": job.MAX_MESSAGES,
        "prompts": job.MAX_PROMPTS,
        "inputs, documents and queries of vectors": most(Job, "prompts"),
        "n": sampling.MAX_CHOICES,
        "prompts x n": job.MAX_ANSWERS,
        "answer, bytes, as prompts x n x tokens x logprobs may take": job.MAX_ANSWER_BYTES,
        "logprobs": sampling.MAX_LOGPROBS,
        "prompt_logprobs": sampling.MAX_LOGPROBS,
        "log probabilities of one prompt, bytes": job.MAX_SCORES_BYTES,
        "stop strings": most(SamplingParams, "stop"),
        "stop string, bytes": sampling.MAX_STOP_BYTES,
        "stop strings, bytes together": sampling.MAX_STOPS_BYTES,
        "metadata, entries": most(Job, "metadata"),
        "metadata, bytes of a name or a value": job.MAX_METADATA_BYTES,
        "schema or pattern, bytes": sampling.MAX_CONSTRAINT_BYTES,
        "schema, nesting": structured.MAX_DEPTH,
        "pattern, repetitions of a part": structured.MAX_REPETITION,
        "schema, optional properties of one object": structured.MAX_OPTIONAL,
        "compiling, seconds of CPU": tried.cpu_s,
        "compiling, seconds in all": tried.wall_s,
        "compiling, bytes of memory": tried.memory_bytes,
        "webhook, seconds for all of one request": of(OutboundSettings, "webhook_timeout_s"),
    }
    section = PAGE.read_text().partition("## What is refused, and why")[2].partition("\n## ")[0]
    assert {name: int(value) for name, value, _ in ROW.findall(section)} == expected


def test_a_worker_refuses_what_a_client_may_have_let_in() -> None:
    """Its own model says how long an answer may be; a job from plain Redis met nobody before."""
    settings = WorkerSettings(model="fake", load_format="fake")
    limits = fake_engine(512, 8, 16, 0).limits
    intake = Intake(settings, load_tokenizer(settings), limits, Generation({}))
    params = SamplingParams(n=16, logprobs=20, max_tokens=None)
    asked = Job(job_id="job", model="fake", prompts=["x"] * 64, params=params)
    with pytest.raises(AnswerTooLarge, match="64 prompts x n=16 x "):
        asyncio.run(intake.prepare(Started(asked, 1, [], None, 0)))


def test_jobs_that_scripts_end_are_refused_as_the_error_classes_say() -> None:
    texts = [each.read_text() for each in script.SCRIPTS.glob("*/*.lua")]
    said = {
        (found["code"], int(found["status"]), found["retryable"] == "true")
        for text in texts
        for found in ENDED.finditer(re.sub(r"'\s*\.\. '", "", text))
    }
    declared = {(each.code, each.status, each.retryable) for each in kinds(PenstockError)}
    assert len(said) >= 5 and said <= declared
    assert ("budget_exceeded", 429, False) in said

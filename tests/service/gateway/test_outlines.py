"""Outlines as a client of the gateway, by its classes for OpenAI's server and for vLLM's."""

import enum
from collections.abc import Iterator
from typing import Literal

import outlines
import pytest
from openai import OpenAI
from pydantic import BaseModel, Field

from penstock import SyncClient
from penstock.compose.server import Server
from penstock.worker.bundled.paths import BUNDLED_MODEL
from stage import GatewayProcess, eventually
from worker_process import WorkerProcess

MODEL = "tiny"


class Mood(enum.Enum):
    GOOD = "good"
    BAD = "bad"


class Report(BaseModel):
    mood: Mood
    level: int = Field(ge=0, le=9)
    tags: list[Literal["a", "b"]] = Field(max_length=2)


class Service:
    def __init__(self, redis_url: str, gateway: GatewayProcess) -> None:
        self.redis_url = redis_url
        self.client = OpenAI(base_url=f"{gateway.url}/v1", api_key="EMPTY", max_retries=0)


@pytest.fixture(scope="module")
def service(server: Server) -> Iterator[Service]:
    with (
        GatewayProcess(server.url) as gateway,
        WorkerProcess(server.url, BUNDLED_MODEL, "--served-model-name", MODEL),
    ):
        service = Service(server.url, gateway)
        eventually(lambda: bool(service.client.models.list().data), within_s=240)
        yield service


@pytest.mark.parametrize("connect", [outlines.from_openai, outlines.from_vllm])
def test_a_model_of_pydantics_comes_back(service: Service, connect: object) -> None:
    model = connect(service.client, MODEL)  # type: ignore[operator]
    for seed in range(5):
        Report.model_validate_json(model("How is it?", Report, max_tokens=200, seed=seed))


@pytest.mark.parametrize(
    "kind, read", [(Mood, Mood), (Literal["x", "y"], "xy".index), (bool, str), (int, int)]
)
def test_vllms_class_asks_for_what_is_no_object(service: Service, kind: object, read: type) -> None:
    model = outlines.from_vllm(service.client, MODEL)
    read(model("How is it?", kind, max_tokens=20))


def test_a_stream_of_a_type_is_one(service: Service) -> None:
    model = outlines.from_vllm(service.client, MODEL)
    Report.model_validate_json("".join(model.stream("How is it?", Report, max_tokens=200)))


def test_a_clients_job_takes_types_too(service: Service) -> None:
    with SyncClient(service.redis_url) as client:
        job = client.enqueue("How is it?", structured_outputs=Report, max_tokens=200)
        [choice] = client.result(job).choices
        Report.model_validate_json(choice.text)

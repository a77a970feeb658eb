"""Makes openai-python's own tests ask what is legal: a pytest plugin, for their environment.

Those tests are written for a mock that takes anything. Names of models, ids, and what a request
must have are put in here; a field that is refused by name is left out and told at the end, with the
refusal. Which those may be is in `REFUSED`, where any other fails the run: what OpenAI's servers
run or keep themselves, what contradicts itself in one request, and values that are no values.
"""

import json
import os
import re

import httpx
import pytest
from openai import BadRequestError
from openai._base_client import AsyncAPIClient, SyncAPIClient

URL = os.environ["TEST_API_BASE_URL"]
MODEL = "penstock-5m"
SAID = [{"role": "assistant", "content": "Hello."}]  # the one role of OpenAI's type for stored ones
PART = b"Example data"  # as those tests send it
BODY = {"model": MODEL, "input": "Hello!"}
LINE = json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/responses", "body": BODY})
NEEDED = {
    "/responses": {"model": MODEL, "input": "Hello!", "max_output_tokens": 8},
    "/responses/input_tokens": {"model": MODEL, "input": "Hello!"},
    "/chat/completions": {"model": MODEL, "messages": SAID, "max_tokens": 8},
    "/completions": {"model": MODEL, "prompt": "Hello!", "max_tokens": 8},
    "/batches": {"endpoint": "/v1/responses"},
}
REFUSED = {
    "/responses": {
        "context_management", "include", "max_tool_calls", "previous_response_id",
        "prompt", "stream_options",
    },
    "/responses/input_tokens": {"conversation", "previous_response_id"},
    "/chat/completions": {"functions", "logit_bias", "max_completion_tokens", "stream_options"},
    "/completions": {"best_of", "echo", "logit_bias", "stream_options", "suffix"},
    "/uploads/{id}/complete": {"md5"},
}  # fmt: skip
KINDS = "responses|chat/completions|files|batches|uploads|conversations"
IDS = re.compile(f"/({KINDS})/([^/]+)(/.*)?")
ITEM = {"type": "message", "role": "user", "content": "Hello!"}
NO_IDS = {"/responses/input_tokens", "/responses/compact"}
found: dict[tuple[str, str], str] = {}  # by path and field: the refusal


def made(kind: str) -> str:
    """Make what an id stands for, and return its own."""
    with httpx.Client(base_url=URL, timeout=60) as http:
        if kind == "responses":
            body = NEEDED["/responses"] | {"background": True}
            return http.post("/responses", json=body).json()["id"]
        if kind == "chat/completions":
            body = NEEDED["/chat/completions"] | {"store": True}
            return http.post("/chat/completions", json=body).json()["id"]
        if kind == "conversations":
            return http.post("/conversations", json={"items": [ITEM]}).json()["id"]
        if kind == "uploads":
            about = {"filename": "a", "mime_type": "text/plain", "purpose": "user_data"}
            return http.post("/uploads", json={"bytes": len(PART), **about}).json()["id"]
        form = {"files": {"file": ("in.jsonl", LINE)}, "data": {"purpose": "batch"}}
        file_id = http.post("/files", **form).json()["id"]
        if kind == "files":
            return file_id
        asked = {
            "input_file_id": file_id,
            "endpoint": "/v1/responses",
            "completion_window": "24h",
        }
        return http.post("/batches", json=asked).json()["id"]


def legal(options) -> None:
    """Put a model that is there, real ids and what is needed into a request."""
    path = options.url.partition("?")[0]
    match = IDS.fullmatch(path)
    test = os.environ["PYTEST_CURRENT_TEST"]
    is_mocked = path.endswith("/content") and "retrieve_content" not in test  # by themselves
    if match and path not in NO_IDS and not is_mocked:
        found_id = made(match[1])
        options.url = f"/{match[1]}/{found_id}{match[3] or ''}"
        if (match[3] or "").startswith("/items/"):
            options.url = f"/{match[1]}/{found_id}/items/{item_of(found_id)}"
        if match[3] == "/complete":
            options.json_data = {**options.json_data, "part_ids": [part_of(found_id)]}
    elif path.startswith("/models/"):
        options.url = f"/models/{MODEL}"
    if isinstance(options.params, dict):
        page = {name: each for name, each in options.params.items() if name != "after"}
        options.params = page | ({"limit": 5} if page.get("limit") == 0 else {})
    needed = NEEDED.get(path)
    if options.method == "post" and needed is not None:
        given = options.json_data if isinstance(options.json_data, dict) else {}
        options.json_data = {**given, **needed}
        if "conversation" in options.json_data and path == "/responses":
            options.json_data["conversation"] = made("conversations")
            options.json_data.pop("previous_response_id", None)  # either goes on
        if path == "/batches":
            options.json_data["input_file_id"] = made("files")


def item_of(conversation_id: str) -> str:
    items = httpx.get(f"{URL}/conversations/{conversation_id}/items").json()
    return items["data"][0]["id"]


def part_of(upload_id: str) -> str:
    url = f"{URL}/uploads/{upload_id}/parts"
    return httpx.post(url, files={"data": PART}).json()["id"]


def left_out(options, refusal: BadRequestError) -> bool:
    """Leave out the field that was refused. Return whether there was one."""
    name = re.split(r"[.\[]", refusal.param or "")[0]
    if not isinstance(options.json_data, dict) or name not in options.json_data:
        return False
    match = IDS.fullmatch(options.url)
    has_id = match and options.url not in NO_IDS
    path = f"/{match[1]}/{{id}}{match[3] or ''}" if has_id else options.url
    found.setdefault((path, name), refusal.message)
    options.json_data = {key: each for key, each in options.json_data.items() if key != name}
    return True


whole, whole_async = SyncAPIClient.request, AsyncAPIClient.request


def request(self, cast_to, options, **more):
    legal(options)
    while True:
        try:
            return whole(self, cast_to, options.model_copy(), **more)
        except BadRequestError as refusal:
            if not left_out(options, refusal):
                raise


async def request_async(self, cast_to, options, **more):
    legal(options)
    while True:
        try:
            return await whole_async(self, cast_to, options.model_copy(), **more)
        except BadRequestError as refusal:
            if not left_out(options, refusal):
                raise


SyncAPIClient.request, AsyncAPIClient.request = request, request_async


def pytest_terminal_summary(terminalreporter) -> None:
    terminalreporter.section("fields that are refused")
    for (path, name), told in sorted(found.items()):
        terminalreporter.line(f"{path} {name}: {told}")


def pytest_sessionfinish(session) -> None:
    if any(name not in REFUSED.get(path, ()) for path, name in found):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED

"""What operators do over HTTP: API keys, queues and more, under a key that says `admin`."""

import asyncio
import json

import httpx
import pytest
import redis

import api_keys
from api_keys import bearer
from penstock.compose.server import Server
from penstock.gateway.auth.api_key import API_KEYS, KEY, ApiKey
from penstock.gateway.auth.keyring import KeyStore
from penstock.gateway.described.table import ROUTES
from penstock.schemas.redis.connection import connect
from scripted import bury
from stage import GatewayProcess, eventually

PATHS = [
    (method, path.format(key_id="aaaaaaaaaaaa", job_id="job_1", model="m", worker="w"))
    for method, _, path in (each.partition(" ") for each in ROUTES)
    if path.startswith("/v1/admin")
]


def test_nobody_administers_a_service_without_keys() -> None:
    """Else the first who comes would shut all others out."""
    assert len(PATHS) == 15
    with Server() as server, GatewayProcess(server.url) as gateway:
        assert httpx.get(gateway.url + "/v1/models").is_success
        for method, path in PATHS:
            refused = httpx.request(method, gateway.url + path)
            assert refused.status_code == 401, (method, path)
            assert "penstock keys create --scopes admin" in refused.text
        with GatewayProcess(server.url, "--api-key", "word") as listed:
            answer = httpx.get(f"{listed.url}/v1/admin/keys", headers=bearer("word"))
            assert answer.json() == {"object": "list", "data": []}


def test_other_scopes_do_not_do(server: Server, admin: httpx.Client) -> None:
    others = ["inference", "jobs", "batches", "metrics"]
    key = bearer(api_keys.issue(server.url, scopes=others))
    eventually(lambda: admin.get("/version", headers=key).is_success)
    for method, path in PATHS:
        assert admin.request(method, path, headers=key).status_code == 403, (method, path)


def test_a_request_for_a_key_that_is_repeated_shows_the_same_key(admin: httpx.Client) -> None:
    def made(name: str) -> httpx.Response:
        headers = {"idempotency-key": "one key"}
        return admin.post("/v1/admin/keys", json={"name": name}, headers=headers)

    first = made("a").json()
    assert KEY.fullmatch(first["key"]) and made("a").json() == first
    assert made("b").json()["error"]["code"] == "idempotency_mismatch"
    admin.delete(f"/v1/admin/keys/{first['key_id']}")
    assert made("a").json()["state"] == "revoked"
    assert admin.post("/v1/admin/keys", json={"name": "a"}).json()["key_id"] != first["key_id"]


def test_a_key_that_is_made_lets_in_until_it_is_revoked(admin: httpx.Client) -> None:
    asked = {
        "name": "CI",
        "tenant": "acme",
        "scopes": ["jobs"],
        "limits": {"requests_per_minute": 60},
        "expires_in_s": 3600,
    }
    made = admin.post("/v1/admin/keys", json=asked).json()
    assert KEY.fullmatch(made["key"])
    assert made["expires_s"] - made["created_s"] == 3600
    assert (made["tenant"], made["scopes"], made["state"]) == ("acme", ["jobs"], "valid")
    eventually(lambda: admin.get("/v1/jobs", headers=bearer(made["key"])).is_success)
    assert admin.get("/metrics", headers=bearer(made["key"])).status_code == 403
    listed = admin.get("/v1/admin/keys")
    assert made["key_id"] in [each["key_id"] for each in listed.json()["data"]]
    assert made["key"].split("_")[2] not in listed.text
    assert "digest" not in listed.text
    revoked = admin.delete(f"/v1/admin/keys/{made['key_id']}").json()
    assert (revoked["state"], "key" in revoked) == ("revoked", False)
    assert admin.delete(f"/v1/admin/keys/{made['key_id']}").json() == revoked
    eventually(lambda: admin.get("/v1/jobs", headers=bearer(made["key"])).status_code == 401)


def test_a_keys_limits_are_changed_and_what_is_left_out_stays(admin: httpx.Client) -> None:
    limits = {"requests_per_minute": 60, "max_running": 3}
    made = admin.post("/v1/admin/keys", json={"name": "CI", "limits": limits}).json()
    path, change = f"/v1/admin/keys/{made['key_id']}", {"requests_per_minute": None, "weight": 2}
    changed = admin.post(path, json={"limits": change}).json()
    assert changed["limits"] == made["limits"] | {"requests_per_minute": None, "weight": 2.0}
    assert admin.post(path, json={"name": "CD"}).json() == changed | {"name": "CD"}
    refused = admin.post(path, json={"limits": {"max_running": 0}})
    assert refused.status_code == 400 and "limits.max_running" in refused.json()["error"]["param"]
    admin.delete(path)
    assert admin.post(path, json={"name": "x"}).json()["state"] == "revoked"
    assert admin.post("/v1/admin/keys/aaaaaaaaaaaa", json={"name": "x"}).status_code == 404


def test_a_key_that_is_revoked_while_it_is_changed_stays_revoked(server: Server) -> None:
    text = api_keys.issue(server.url, name="old")
    key_id = text.split("_")[1]

    async def change() -> ApiKey | None:
        async with connect(server.url) as client:
            return await KeyStore(client).change(key_id, changed)

    def changed(key: ApiKey) -> ApiKey:
        with redis.Redis.from_url(server.url) as client:
            now = ApiKey.model_validate_json(client.hget(API_KEYS, key_id))
            client.hset(API_KEYS, key_id, now.model_copy(update={"revoked_s": 1}).dump())
        return key.model_copy(update={"name": "new"})

    key = asyncio.run(change())
    assert key is not None and (key.name, key.revoked_s) == ("new", 1)


def test_a_key_that_a_newer_version_wrote_is_told_of(server: Server, admin: httpx.Client) -> None:
    newer = {"key_id": "b" * 12, "digest": "0", "scopes": ["more"]}
    with redis.Redis.from_url(server.url) as client:
        client.hset(API_KEYS, newer["key_id"], json.dumps(newer))
        refused = admin.get("/v1/admin/keys")
        client.hdel(API_KEYS, newer["key_id"])
    assert refused.status_code == 501 and "newer version" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"scopes": ["everything"]}, "scopes"),
        ({"tenant": "a b"}, "tenant"),
        ({"limits": {"requests_per_minute": -1}}, "limits.requests_per_minute"),
        ({"max_priority": "highest"}, "max_priority"),
        ({"expires_in_s": 0}, "expires_in_s"),
    ],
)
def test_a_key_that_cannot_be_is_refused_by_name(
    admin: httpx.Client, body: dict[str, object], param: str
) -> None:
    before = len(admin.get("/v1/admin/keys").json()["data"])
    refused = admin.post("/v1/admin/keys", json=body)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"].startswith(param)
    assert len(admin.get("/v1/admin/keys").json()["data"]) == before
    assert admin.delete("/v1/admin/keys/aaaaaaaaaaaa").status_code == 404


def test_dead_letters_are_listed_shown_requeued_and_dropped(
    server: Server, admin: httpx.Client
) -> None:
    first, second = bury(server.url), bury(server.url)
    path = "/v1/admin/dead_letters"
    listed = admin.get(path)
    assert [each["job"] for each in listed.json()["data"]] == [second, first]
    shown = admin.get(f"{path}/{first}")
    assert (shown.json()["reason"], shown.json()["can_be_requeued"]) == ("worker_crashed", True)
    assert "CANARY" not in listed.text + shown.text
    again = admin.post(f"{path}/{first}/requeue").json()
    assert again["job"] == first != again["requeued_as"]
    dropped = admin.delete(f"{path}/{second}").json()
    assert dropped == {"id": second, "object": "dead_letter", "deleted": True}
    assert admin.get(path).json()["data"] == []
    for job_id in (first, second, "nonsense"):
        assert admin.get(f"{path}/{job_id}").status_code == 404
        assert admin.delete(f"{path}/{job_id}").status_code == 404
        assert admin.post(f"{path}/{job_id}/requeue").status_code == 404

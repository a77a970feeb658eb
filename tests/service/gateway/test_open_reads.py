"""A limit on reads of jobs that were submitted elsewhere, by key."""

import threading
from contextlib import ExitStack

import httpx

from api_keys import bearer, issue
from stage import MODEL, Actor, GatewayProcess, eventually, spoken


def test_a_key_has_so_many_reads_open_and_is_told_how_to_go_on(redis_url: str) -> None:
    going_on = threading.Event()

    def script(job: object) -> list[object]:
        first, *rest = spoken("a", "b")
        return [first, going_on, *rest]

    keys = [issue(redis_url, tenant=tenant, scopes=["jobs", "inference"]) for tenant in "ab"]
    asked = {"model": MODEL, "prompt": "x", "background": True}
    with (
        Actor(redis_url, script=script),  # type: ignore[arg-type]
        GatewayProcess(redis_url, "--max-open-reads", "2") as gateway,
        httpx.Client(base_url=gateway.url, timeout=30) as http,
        ExitStack() as reads,
    ):
        jobs = [http.post("/v1/jobs", json=asked, headers=bearer(key)).json()["id"] for key in keys]
        paths = [f"/v1/jobs/{job_id}/events" for job_id in jobs]
        for _ in range(2):
            opened = http.stream("GET", paths[0], headers=bearer(keys[0]))
            assert reads.enter_context(opened).status_code == 200
        refused = http.get(paths[0], headers=bearer(keys[0]))
        assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
        error = refused.json()["error"]
        assert error["code"] == "too_many_reads" and "close one" in error["message"]
        own = {**bearer(keys[0]), "idempotency-key": "mine"}
        chat = {"model": MODEL, "prompt": "x", "stream": True}
        with http.stream("POST", "/v1/completions", json=chat, headers=own) as first:
            assert first.status_code == 200  # it submits what it follows
            again = http.post("/v1/completions", json=chat, headers=own)
            assert again.status_code == 429 and again.json()["error"]["code"] == "too_many_reads"
        with http.stream("GET", paths[1], headers=bearer(keys[1])) as other:
            assert other.status_code == 200
        reads.close()
        going_on.set()
        eventually(lambda: http.get(paths[0], headers=bearer(keys[0])).status_code == 200)

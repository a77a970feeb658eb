"""Every role runs under a Redis user of its own, and is refused what it does not need."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import redis
import yaml

from penstock.compose.acl import ROLES, line
from penstock.compose.server import Server
from penstock.gateway.auth.api_key import API_KEYS
from penstock.schemas.keys import CHORES, MODELS, Lane
from stage import GatewayProcess, HousekeepingProcess, eventually
from worker_process import WorkerProcess

PASSWORD = "for a test"
LANE = Lane("fake")
OUTSIDE = "elsewhere:key"
OF_REDIS_6 = {"acl-pubsub-default": "allchannels"}


@dataclass(frozen=True, slots=True)
class Guarded:
    server: Server

    def url(self, role: str) -> str:
        return self.server.url.replace("//", f"//{role}:{PASSWORD.replace(' ', '%20')}@")

    def as_role(self, role: str) -> redis.Redis:
        return redis.Redis(port=self.server.port, username=role, password=PASSWORD)


def has_version_6(admin: redis.Redis) -> bool:
    return str(admin.info("server")["redis_version"]).startswith("6.")


@pytest.fixture(scope="module")
def guarded() -> Iterator[Guarded]:
    with Server(options=OF_REDIS_6) as server:
        with redis.Redis(port=server.port) as admin:
            is_redis_6 = has_version_6(admin)
            for role in ROLES:
                rule = line(role, PASSWORD, has_waitaof=False, is_redis_6=is_redis_6)
                _, name, *rules = rule.split(" ")
                admin.execute_command("ACL", "SETUSER", name, *rules)
            admin.set(OUTSIDE, "secret")
            admin.hset(API_KEYS, "id", "{}")
            admin.hdel(API_KEYS, "id")
            admin.acl_setuser("default", enabled=False)
        yield Guarded(server)


def test_jobs_run_with_every_process_under_its_own_user(guarded: Guarded) -> None:
    with (
        HousekeepingProcess(guarded.url("housekeeping")) as housekeeping,
        WorkerProcess(guarded.url("worker"), "fake") as worker,
        GatewayProcess(guarded.url("gateway")) as gateway,
        httpx.Client(base_url=gateway.url, timeout=60) as http,
    ):
        worker.ready()
        body = {"model": "fake", "prompt": "x", "max_tokens": 20}
        assert http.post("/v1/completions", json=body).status_code == 200
        job = http.post("/v1/jobs", json=body)
        assert job.status_code in (200, 202), job.text
        path = f"/v1/jobs/{job.json()['id']}"
        eventually(lambda: http.get(path).json()["state"] == "succeeded", 60)
        assert http.delete(path).status_code < 300
        assert worker.stop() == 0
        assert "NOPERM" not in worker.logged()
        housekeeping.process.terminate()
        assert housekeeping.process.wait(60) == 0
        assert "NOPERM" not in housekeeping.log.read_text()


@pytest.mark.parametrize("role", [role.name for role in ROLES])
@pytest.mark.parametrize(
    "words",
    [
        ("FLUSHALL",),
        ("CONFIG", "GET", "*"),
        ("ACL", "LIST"),
        ("SHUTDOWN", "NOSAVE"),
        ("GET", OUTSIDE),
        ("SET", OUTSIDE, "x"),
        ("EVAL", "return redis.call('GET', KEYS[1])", "1", OUTSIDE),
        ("EVAL", f"return redis.call('GET', '{OUTSIDE}')", "1", LANE.prefix),
        ("SUBSCRIBE", "elsewhere"),
        ("REPLICAOF", "NO", "ONE"),
        ("MODULE", "LIST"),
    ],
    ids=lambda words: " ".join(words)[:30],
)
def test_nobody_may_reach_outside_or_rule_the_server(
    guarded: Guarded, role: str, words: tuple[str, ...]
) -> None:
    with (
        guarded.as_role(role) as client,
        pytest.raises(redis.ResponseError, match=r"(?i)no permissions|NOPERM|can't (run|access)"),
    ):
        client.execute_command(*words)


@pytest.mark.parametrize(
    "role, key", [("worker", API_KEYS), ("client", API_KEYS), ("worker", f"{CHORES}secrets")]
)
def test_who_computes_or_submits_sees_no_api_keys(guarded: Guarded, role: str, key: str) -> None:
    with guarded.as_role(role) as client, pytest.raises(redis.exceptions.NoPermissionError):
        client.hgetall(key)


def test_all_roles_but_the_router_reach_the_lanes(guarded: Guarded) -> None:
    for role in ROLES[:-1]:
        with guarded.as_role(role.name) as client:
            assert client.hget(LANE.job("none"), "state") is None
            client.hget(MODELS, "none")


def test_a_client_reads_the_list_of_models_and_changes_nothing_of_it(guarded: Guarded) -> None:
    with guarded.as_role("operator") as operator:
        if has_version_6(operator):
            pytest.skip("before Redis 7 who may read a key may write it")
    script = "return redis.call('HSET', KEYS[1], 'x', '{}')"
    with guarded.as_role("client") as client:
        assert client.hvals(MODELS) is not None
        for words in (
            ("HSET", MODELS, "x", "{}"),
            ("HDEL", MODELS, "fake"),
            ("DEL", MODELS),
            ("EVAL", script, "1", MODELS),
            ("EVAL", script.replace("KEYS[1]", f"'{MODELS}'"), "1", LANE.prefix),
        ):
            with pytest.raises(
                redis.ResponseError, match=r"(?i)no permissions|NOPERM|can't access"
            ):
                client.execute_command(*words)


def test_a_router_reads_what_workers_have_cached_and_leases_and_no_more(guarded: Guarded) -> None:
    blocks, events = (f"{LANE.prefix}worker:w:kv_{name}" for name in ("blocks", "events"))
    with guarded.as_role("worker") as worker:
        worker.hset(blocks, "seq", 1)
        worker.xadd(events, {"ts": "1", "events": "[]"}, "1-0")
    with guarded.as_role("router") as router:
        assert router.hgetall(blocks) == {b"seq": b"1"}
        assert [name for name, _ in router.xread({events: "0-0"}, block=10)[0][1]] == [b"1-0"]
        assert router.zscore(f"{LANE.prefix}workers", "nobody") is None
        for words in (
            ("HGETALL", f"{LANE.prefix}worker:w"),
            ("HGETALL", LANE.job("some")),
            ("XRANGE", f"{LANE.job('some')}:log", "-", "+"),
            ("HSET", blocks, "seq", "2"),
            ("XADD", events, "*", "ts", "1"),
            ("DEL", events),
            ("SUBSCRIBE", LANE.inbox("some")),
        ):
            with pytest.raises(redis.exceptions.NoPermissionError):
                router.execute_command(*words)
    # Redis 6 lets who may read a key write it too, by the commands that are allowed.
    (role,) = (role for role in ROLES if role.name == "router")
    commands = line(role, "x", has_waitaof=False, is_redis_6=True).split()
    assert not {"+hset", "+xadd", "+del", "+zadd"} & set(commands)


def test_printed_lines_are_what_a_server_takes() -> None:
    acl = [sys.executable, "-m", "penstock.compose.cli", "acl"]
    with Server() as server, redis.Redis(port=server.port) as admin:
        acl += ["--redis-6"] if has_version_6(admin) else []
    printed = subprocess.run(acl, capture_output=True, text=True, timeout=60)
    lines = printed.stdout.splitlines()
    assert [each.split()[1] for each in lines] == [role.name for role in ROLES]
    logins = dict(each.removeprefix("redis://").split(":", 1) for each in printed.stderr.split())
    with Server(options=OF_REDIS_6) as server, redis.Redis(port=server.port) as admin:
        for each in lines:
            _, name, *rules = each.split(" ")
            admin.execute_command("ACL", "SETUSER", name, *rules)
            password = logins[name].removesuffix("@...")
            with redis.Redis(port=server.port, username=name, password=password) as client:
                assert client.ping()
                assert password not in each


def test_files_for_a_server_and_its_roles(tmp_path: Path) -> None:
    folder, at = tmp_path / "secrets", "127.0.0.1:{}"
    acl = [sys.executable, "-m", "penstock.compose.cli", "acl", "--into", str(folder)]
    with Server(folder=tmp_path / "redis") as server:
        made = subprocess.run(
            [*acl, "--redis-at", at.format(server.port)], capture_output=True, text=True, check=True
        )
        with redis.Redis(port=server.port) as admin:
            for rule in (folder / "users.acl").read_text().splitlines()[::-1]:
                admin.execute_command("ACL", "SETUSER", *rule.split(" ")[1:])
        url = yaml.safe_load((folder / "gateway.yaml").read_text())["redis_url"]
        assert url not in made.stdout + made.stderr
        with redis.Redis.from_url(url) as gateway:
            assert gateway.ping()
        with pytest.raises(redis.AuthenticationError):
            redis.Redis(port=server.port).ping()
        keys = [sys.executable, "-m", "penstock.compose.cli", "keys", "list"]
        assert (
            subprocess.run([*keys, "--config", f"{folder}/operator.yaml"], check=False).returncode
            == 0
        )
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    before = (folder / "users.acl").read_text()
    subprocess.run(acl, check=True)
    assert (folder / "users.acl").read_text() == before


def test_each_role_may_be_given_its_own_files_alone(tmp_path: Path) -> None:
    acl = [sys.executable, "-m", "penstock.compose.cli", "acl", "--apart", "--into", str(tmp_path)]
    for _ in range(2):
        subprocess.run(acl, check=True)
    found = {path.relative_to(tmp_path): path.read_text() for path in tmp_path.rglob("*.*")}
    assert {str(path) for path in found} == {
        "redis/users.acl",
        *(f"{role.name}/{role.name}.yaml" for role in ROLES),
    }
    secrets = {folder: tmp_path / folder / "server-secret" for folder in ("gateway", "operator")}
    assert len({path.read_text() for path in secrets.values()}) == 1
    assert {path.parent.name for path in tmp_path.rglob("server-secret")} == {*secrets}
    for folder in tmp_path.iterdir():
        own = "".join(path.read_text() for path in folder.iterdir())
        others = {role.name for role in ROLES} - {folder.name}
        assert folder.name == "redis" or not any(f"//{name}:" in own for name in others)


def test_files_before_redis_7_grant_what_it_knows() -> None:
    acl = [sys.executable, "-m", "penstock.compose.cli", "acl", "--redis-6"]
    assert "%R" not in subprocess.run(acl, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("flags", [("--redis-at", "redis:6379"), ("--apart",)])
def test_what_is_of_files_is_refused_without_them(flags: tuple[str, ...]) -> None:
    acl = [sys.executable, "-m", "penstock.compose.cli", "acl", *flags]
    ended = subprocess.run(acl, capture_output=True, text=True, check=False)
    assert ended.returncode == 2 and "--into" in ended.stderr

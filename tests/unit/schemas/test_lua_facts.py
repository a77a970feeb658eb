"""Facts that stand both in Lua and in Python are the same in both."""

import ast
import inspect
import json
import re

import pytest

from paths import ROOT
from penstock.gateway.queue_client import QueueClient
from penstock.schemas import errors, job
from penstock.schemas.account import Quota
from penstock.schemas.errors import PenstockError
from penstock.schemas.job import Job
from penstock.schemas.keys import READY
from penstock.schemas.queue.queue import CLASSES, Queue

SCRIPTS = ROOT / "schemas" / "scripts"
TEXTS = {path.stem: path.read_text() for path in SCRIPTS.rglob("*.lua")}
CODES = {
    each.code: each
    for each in vars(errors).values()
    if isinstance(each, type) and issubclass(each, PenstockError)
}
# `'..' .. '..'`, over several lines.
LITERAL = r"('[^'\n]*'(?:\s*\.\.\s*'[^'\n]*')*)"


def value(script: str, name: str) -> str:
    """The right side of `local NAME = ..`, also of several names at once."""
    for names, values in re.findall(r"^local ([A-Z_, ]+) = (.+)", TEXTS[script], re.MULTILINE):
        if name in (found := names.split(", ")):
            return str(values if len(found) == 1 else values.split(", ")[found.index(name)])
    raise AssertionError(f"{script}.lua has no {name}")


def text(script: str, name: str) -> str:
    found = re.search(rf"^local {name} = {LITERAL}", TEXTS[script], re.MULTILINE)
    assert found is not None, f"{script}.lua has no text {name}"
    return "".join(re.findall(r"'([^'\n]*)'", found[1]))


def strings(script: str, name: str) -> tuple[str, ...]:
    found = re.search(rf"^local {name} = {{(.*?)}}", TEXTS[script], re.MULTILINE | re.DOTALL)
    assert found is not None, f"{script}.lua has no list {name}"
    return tuple(re.findall(r"'([^']*)'", found[1]))


def documented_options() -> set[str]:
    head = TEXTS["enqueue"].partition("-- Returns")[0]
    return set(re.findall(r"^--   (\w+) ", head, re.MULTILINE)) | {"delay_ms"}


def sent_options() -> set[str]:
    """The names that `Queue.enqueue` may write into its `options`."""
    tree = ast.parse(inspect.cleandoc(inspect.getsource(Queue.enqueue)))
    dicts = [node for node in ast.walk(tree) if isinstance(node, ast.Dict)]
    names = {ast.literal_eval(key) for node in dicts for key in node.keys if key is not None}
    loops = [node.iter for node in ast.walk(tree) if isinstance(node, ast.For)]
    names |= {name for loop in loops for name in ast.literal_eval(loop)}
    stores = [node for node in ast.walk(tree) if isinstance(node, ast.Subscript)]
    keys = [node.slice for node in stores if isinstance(node.ctx, ast.Store)]
    return names | {key.value for key in keys if isinstance(key, ast.Constant)}


def test_ready_streams_are_read_in_one_order() -> None:
    assert strings("lane", "READY") == READY


def test_the_classes_are_the_same() -> None:
    assert strings("waiting", "CLASSES") == CLASSES


def test_enqueue_takes_the_options_that_it_documents_and_is_sent_no_other() -> None:
    taken = set(text("enqueue", "OPTIONS").split())
    assert documented_options() == taken
    assert sent_options() == taken


def test_the_limits_of_an_account_are_the_same() -> None:
    assert {*strings("accounts", "LIMITS"), "max_stored_bytes"} == set(Quota.model_fields)


def test_times_have_the_same_bounds() -> None:
    assert int(value("enqueue", "YEAR_MS")) == job.YEAR_MS
    assert int(value("enqueue", "LAST_MS")) == job.LAST_MS


@pytest.mark.parametrize(
    "option, parameter", [("max_queued", "max_queued"), ("ttl_s", "result_ttl_s")]
)
def test_an_option_that_is_left_out_is_what_the_client_sends(option: str, parameter: str) -> None:
    found = re.findall(rf"options\.{option} or (\d+)", TEXTS["enqueue"])
    usual = inspect.signature(QueueClient.__init__).parameters[parameter].default
    assert {int(each) for each in found} == {usual}
    shown = re.search(rf"^--   {option} .*; (\d+)$", TEXTS["enqueue"], re.MULTILINE)
    assert shown is not None and int(shown[1]) == usual


ERRORS = [
    (script, name)
    for script, body in sorted(TEXTS.items())
    for name in re.findall(r"""^local ([A-Z_]+) = '"state":""", body, re.MULTILINE)
]


@pytest.mark.parametrize("script, name", ERRORS)
def test_an_error_that_a_script_writes_is_one_of_ours(script: str, name: str) -> None:
    written = json.loads("{" + text(script, name).replace("%d", "1") + "}")["error"]
    ours = CODES[written["code"]]
    assert written["status"] == ours.status
    assert written.get("retryable", False) == ours.retryable


def test_every_script_that_writes_an_error_is_looked_at() -> None:
    mentions = sum(len(re.findall(r'"error":{"code"', body)) for body in TEXTS.values())
    assert mentions == len(ERRORS) and len(ERRORS) >= 6


def test_a_job_gives_the_queue_the_options_that_it_has() -> None:
    assert {"timeout_ms", "queue_timeout_ms", "not_before_ms", "delay_ms"} <= set(Job.model_fields)

"""Each route asks for a scope of its caller's key, or is named here as one that asks for none."""

import re

from fastapi.routing import APIRoute

from paths import ROOT
from penstock.gateway.auth.access import OPEN_PATHS, PATH_SCOPES
from penstock.gateway.http.writes import WRITE_LIMIT
from penstock.gateway.process.settings import GatewaySettings
from penstock.gateway.server.app import ROUTERS, build

FOR_ANY_KEY = {"/v1/models", "/v1/models/{name}", "/version", "/v1/usage"}
ROW = re.compile(r"^\| `(/[^`]*)` \| ([A-Z, ]+) \| (\w+) \|", re.MULTILINE)
ROUTES = {
    path: ", ".join(sorted(method.upper() for method in methods))
    for path, methods in build(GatewaySettings(enable_tokenizer_info_endpoint=True))
    .openapi()["paths"]
    .items()
}


def scope(path: str) -> str:
    if path in OPEN_PATHS:
        return "open"
    return next((scope for start, scope in PATH_SCOPES if path.startswith(start)), "any")


def test_each_route_needs_a_scope_or_is_known_to_need_none() -> None:
    paths = set(ROUTES)
    scoped = {path for path in paths if path.startswith(tuple(start for start, _ in PATH_SCOPES))}
    assert len(scoped) > 15
    assert paths - scoped - OPEN_PATHS == FOR_ANY_KEY


def test_the_page_of_http_has_each_route_with_its_methods_and_scope() -> None:
    told = ROW.findall((ROOT / "docs" / "http.md").read_text())
    mine = {(re.sub(r"{\w+}", "{id}", path), each, scope(path)) for path, each in ROUTES.items()}
    assert sorted(told) == sorted(mine)


# POSTs that run a job, which its model's lane counts; that end something; or that operators ask.
NOT_COUNTED = re.compile(
    r"/v1/(chat/completions|completions|responses|messages|embeddings|score|rerank|jobs)"
    r"|/v1/chat/completions/render|/v1/completions/render|/v1/messages/count_tokens"
    r"|/v1/responses/input_tokens|/v1/jobs/{job_id}/share|.*/cancel|/v1/admin/.*|(/v2)?/rerank"
    r"|/score|/classify|/pooling|/inference/.*|/abort_requests|/tokenize|/detokenize"
    r"|/reset_prefix_cache"
)


def test_each_post_counts_as_a_request_of_its_key() -> None:
    posts = [
        route
        for router in ROUTERS
        for route in router.routes
        if isinstance(route, APIRoute) and "POST" in route.methods
    ]
    counted = {route.path for route in posts if route.dependencies == WRITE_LIMIT}
    others = {route.path for route in posts} - counted
    assert len(counted) == 9
    assert {path for path in others if not NOT_COUNTED.fullmatch(path)} == set()

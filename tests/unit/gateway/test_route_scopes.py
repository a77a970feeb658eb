"""Each route asks for a scope of its caller's key, or is named here as one that asks for none."""

import re

from paths import ROOT
from penstock.gateway.auth.access import NEEDED, OPEN_PATHS
from penstock.gateway.http.settings import GatewaySettings
from penstock.gateway.server.app import build

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
    return next((scope for start, scope in NEEDED if path.startswith(start)), "any")


def test_each_route_needs_a_scope_or_is_known_to_need_none() -> None:
    paths = set(ROUTES)
    scoped = {path for path in paths if path.startswith(tuple(start for start, _ in NEEDED))}
    assert len(scoped) > 15
    assert paths - scoped - OPEN_PATHS == FOR_ANY_KEY


def test_the_page_of_http_has_each_route_with_its_methods_and_scope() -> None:
    told = ROW.findall((ROOT / "docs" / "http.md").read_text())
    mine = {(re.sub(r"{\w+}", "{id}", path), each, scope(path)) for path, each in ROUTES.items()}
    assert sorted(told) == sorted(mine)

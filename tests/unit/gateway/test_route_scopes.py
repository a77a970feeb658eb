"""Each route asks for a scope of its caller's key, or is named here as one that asks for none."""

from penstock.gateway.auth.access import NEEDED, OPEN_PATHS
from penstock.gateway.http.settings import GatewaySettings
from penstock.gateway.server.app import build

FOR_ANY_KEY = {"/v1/models", "/v1/models/{name}", "/version"}


def test_each_route_needs_a_scope_or_is_known_to_need_none() -> None:
    paths = set(build(GatewaySettings()).openapi()["paths"])
    scoped = {path for path in paths if path.startswith(tuple(start for start, _ in NEEDED))}
    assert len(scoped) > 15
    assert paths - scoped - OPEN_PATHS == FOR_ANY_KEY

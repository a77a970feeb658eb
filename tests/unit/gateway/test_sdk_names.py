"""What an application sees of the SDK's clients is what their page says, of both the same."""

import re

import pytest

from paths import ROOT
from penstock.gateway.client import Client
from penstock.gateway.sync_client import SyncClient

URL = "redis://127.0.0.1:1"
ROWS = re.compile(r"^\| `(\w+)`(?: \(`(\w+)`\))? \|", re.M)  # `SyncClient`'s name in brackets
LISTED = ROWS.findall((ROOT / "docs/sdk.md").read_text())


@pytest.mark.parametrize(
    "client, documented",
    [
        (Client(URL), {name for name, _ in LISTED}),
        (SyncClient(URL), {own or name for name, own in LISTED}),
    ],
    ids=["Client", "SyncClient"],
)
def test_a_client_shows_the_calls_of_its_page_and_no_more(
    client: Client | SyncClient, documented: set[str]
) -> None:
    assert {name for name in dir(client) if not name.startswith("_")} == documented


def test_each_call_of_the_page_says_what_it_does() -> None:
    calls = [
        getattr(each, call)
        for name, own in LISTED
        for each, call in ((Client, name), (SyncClient, own or name))
    ]
    assert len(calls) == 20 and all(call.__doc__ for call in calls)

"""The lines of a batch's file, as they are checked before any of them becomes a job."""

import codecs
import json
from pathlib import Path

import pytest

from penstock.gateway.batches.lines import MAX_LINE_BYTES, line_at, line_errors, lines_from

URL = "/v1/chat/completions"


def line(custom_id: str, method: str = "POST") -> bytes:
    body = {"model": "m", "messages": []}
    asked = {"custom_id": custom_id, "method": method, "url": URL, "body": body}
    return json.dumps(asked).encode() + b"\n"


@pytest.mark.parametrize("excess", [1, 2, MAX_LINE_BYTES, 2 * MAX_LINE_BYTES + 7])
def test_a_line_that_is_too_long_is_one_line_with_one_error(tmp_path: Path, excess: int) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(line("a") + b"x" * (MAX_LINE_BYTES + excess) + b"\n" + line("b", "GET"))
    count, wrong = line_errors(path, URL)
    assert count == 3
    assert [each["line"] for each in wrong] == [2, 3]
    assert wrong[0]["message"] == f"longer than {MAX_LINE_BYTES} bytes"


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_places_lie_side_by_side(tmp_path: Path, end: bytes) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(line("a") + b"x" * 2 * MAX_LINE_BYTES + b"\n" + line("b").strip() + end)
    places = [place for place, _ in lines_from(path, 0)]
    assert [place.offset for place in places[1:]] == [each.offset + each.length for each in places][
        :-1
    ]
    assert places[-1].offset + places[-1].length == path.stat().st_size


def test_a_byte_order_mark_is_of_no_line(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(codecs.BOM_UTF8 + line("a") + line("b"))
    assert line_errors(path, URL) == (2, [])
    places = [place for place, _ in lines_from(path, 0)]
    assert [line_at(path, place).custom_id for place in places] == ["a", "b"]
    assert [raw for _, raw in lines_from(path, places[1].offset)] == [line("b")]

"""The order in which a batch's lines run."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.batches.order import in_groups, read_order, write_order

LONG = "Answer as a lawyer of maritime law would. " * 40


def chat(system: str, question: str, **more: object) -> dict[str, object]:
    said = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    return {"model": "m", "messages": said, **more}


def written(path: Path, bodies: list[dict[str, object]]) -> Path:
    lines = [
        {"custom_id": str(at), "method": "POST", "url": "/v1/chat/completions", "body": body}
        for at, body in enumerate(bodies)
    ]
    path.write_text("".join(json.dumps(line) + "\n\n" for line in lines))
    return path


def test_lines_of_one_beginning_follow_each_other_in_their_own_order() -> None:
    bodies = [chat(LONG + name, f"{at}") for at in range(3) for name in "abc"]
    assert in_groups(bodies) == [0, 3, 6, 1, 4, 7, 2, 5, 8]


def test_beginnings_within_beginnings_follow_each_other_too() -> None:
    bodies = [chat(LONG, document * 300 + name) for document in "xyx" for name in "ab"]
    assert in_groups(bodies) == [0, 4, 1, 5, 2, 3]
    prompts = [{"prompt": LONG + document * 3000 + f"{at}"} for at, document in enumerate("xyxy")]
    assert in_groups(prompts) == [0, 2, 1, 3]
    ids = [{"prompt": [*range(400), *[end] * 400, at]} for at, end in enumerate((7, 8, 7, 8))]
    assert in_groups(ids) == [0, 2, 1, 3]


def test_lines_of_another_model_share_nothing() -> None:
    bodies = [chat(LONG, "why") | {"model": name} for name in "abab"]
    assert in_groups(bodies) == [0, 2, 1, 3]


def test_lines_with_nothing_in_common_stay_as_they_are() -> None:
    assert in_groups([{"prompt": f"{at:080}"[::-1]} for at in range(50)]) == [*range(50)]


@given(
    st.lists(
        st.dictionaries(st.sampled_from(["prompt", "input", "x"]), st.text() | st.lists(st.text()))
    )
)
def test_each_line_has_one_turn(bodies: list[dict[str, object]]) -> None:
    assert sorted(in_groups(bodies)) == [*range(len(bodies))]


@pytest.mark.parametrize("is_grouped", [True, False])
def test_a_file_of_the_order_is_read_from_any_turn(tmp_path: Path, is_grouped: bool) -> None:
    bodies = [chat(LONG + name, f"{at}") for at in range(3) for name in "ab"]
    lines, order = written(tmp_path / "lines", bodies), tmp_path / "order"
    write_order(lines, order, is_grouped)
    turns = [turn for begin in (0, 2, 4) for turn in read_order(order, begin, 2)]
    assert [turn.number for turn in turns] == (in_groups(bodies) if is_grouped else [*range(6)])
    content = lines.read_bytes()
    for number, place in turns:
        line = json.loads(content[place.offset : place.offset + place.length])
        assert (line["custom_id"], line["body"]) == (str(number), bodies[number])
    assert read_order(order, 6, 2) == []

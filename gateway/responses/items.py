"""The items of a response as they are made: what was thought, what is said, what is called."""

from collections.abc import Iterator, Sequence

from pydantic import JsonValue

from penstock.gateway.openai.responses import AnswerContext, chat_logprobs, tool_call
from penstock.schemas.api.openai import JsonObject
from penstock.schemas.event import TokenLogprob
from penstock.schemas.markup.source import CallPiece, Found

Told = tuple[str, JsonObject]  # an event's type, and its fields but for its number


class Items:
    """Makes items of what is read of an answer, and tells each step of it as OpenAI's events.

    At most one item is open: it gets what comes until something of another kind comes.
    """

    def __init__(self, form: AnswerContext) -> None:
        self.items: list[JsonObject] = []
        self._form = form
        self._kind = ""  # the open item's kind
        self._text = ""  # the open item's text by now
        self._logprobs: list[JsonValue] = []

    def take(self, answer: Found, logprobs: Sequence[TokenLogprob] | None) -> Iterator[Told]:
        if answer.reasoning and self._form.shows_reasoning:
            yield from self._open("reasoning")
            yield from self._grow("response.reasoning_text.delta", answer.reasoning)
        shape = chat_logprobs(self._form, logprobs)
        scores = shape["content"] if shape else []
        assert isinstance(scores, list)
        if answer.content or (scores and self._kind == "message"):
            yield from self._open("message")
            self._logprobs += scores
            yield from self._grow("response.output_text.delta", answer.content, logprobs=scores)
        for piece in answer.calls:
            yield from self._take_call(piece)

    def close(self, status: str = "completed") -> Iterator[Told]:
        """Close the open item, if there is one."""
        kind, text = self._kind, self._text
        at: JsonObject = {"output_index": len(self.items) - 1}
        if not kind:
            return
        self._kind, self._text = "", ""
        item = self.items[-1]
        at["item_id"] = item["id"]
        if kind in ("reasoning", "message"):
            part = self._part(kind, text)
            name = "reasoning_text" if kind == "reasoning" else "output_text"
            more = {"logprobs": part["logprobs"]} if kind == "message" else {}
            yield f"response.{name}.done", {**at, "content_index": 0, "text": text, **more}
            yield "response.content_part.done", {**at, "content_index": 0, "part": part}
            item |= {"content": [part], "status": status}
        elif kind == "function_call":
            item |= {"arguments": text, "status": status}
            fields = {"arguments": text, "name": item["name"]}
            yield "response.function_call_arguments.done", {**at, **fields}
        else:
            yield "response.custom_tool_call_input.done", {**at, "input": item["input"]}
        yield "response.output_item.done", {"output_index": at["output_index"], "item": {**item}}

    def _take_call(self, piece: CallPiece) -> Iterator[Told]:
        if piece.name is None:
            yield from self._grow("response.function_call_arguments.delta", piece.arguments)
            return
        yield from self.close()
        call = tool_call(self._form, 0, piece)
        custom = call.get("custom")
        if isinstance(custom, dict):  # it comes in one piece
            own = custom | named_apart(self._form, piece.name)
            yield from self._add("custom_tool_call", {"call_id": call["id"], **own})
            yield from self._grow("response.custom_tool_call_input.delta", str(custom["input"]))
            return
        own = named_apart(self._form, piece.name)
        yield from self._add("function_call", {"call_id": call["id"], **own, "arguments": ""})
        yield from self._grow("response.function_call_arguments.delta", piece.arguments)

    def _open(self, kind: str) -> Iterator[Told]:
        """Open an item of text of a kind, unless the open one is of that kind."""
        if kind == self._kind:
            return
        yield from self.close()
        self._logprobs = []
        more: JsonObject = {"summary": []} if kind == "reasoning" else {"role": "assistant"}
        yield from self._add(kind, {**more, "content": []})
        at = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        part = self._part(kind, "")
        yield "response.content_part.added", {**at, "content_index": 0, "part": part}

    def _add(self, kind: str, fields: JsonObject) -> Iterator[Told]:
        heads = {"reasoning": "rs", "message": "msg", "function_call": "fc"}
        item_id = f"{heads.get(kind, 'ctc')}_{self._form.job.job_id}_{len(self.items)}"
        item: JsonObject = {"id": item_id, "type": kind, "status": "in_progress", **fields}
        self.items.append(item)
        self._kind = kind
        shape = {**item, "input": ""} if "input" in item else {**item}
        yield "response.output_item.added", {"output_index": len(self.items) - 1, "item": shape}
        if kind == "custom_tool_call":
            item["status"] = "completed"

    def _grow(self, event: str, text: str, **more: JsonValue) -> Iterator[Told]:
        if not text and not more.get("logprobs"):
            return
        self._text += text
        at: JsonObject = {
            "item_id": self.items[-1]["id"],
            "output_index": len(self.items) - 1,
        }
        if self._kind in ("reasoning", "message"):
            at["content_index"] = 0
        yield event, {**at, "delta": text, **more}

    def _part(self, kind: str, text: str) -> JsonObject:
        if kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        logprobs = [*self._logprobs] if text else []
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def named_apart(form: AnswerContext, name: str) -> JsonObject:
    """Return the fields that name a tool: where it is in a namespace, that one and its own name."""
    if name not in form.namespaces:
        return {"name": name}
    namespace, own = form.namespaces[name]
    return {"name": own, "namespace": namespace}

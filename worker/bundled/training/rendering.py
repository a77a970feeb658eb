"""Documents as the text that the model reads, and how much of each piece it learns to write."""

from dataclasses import dataclass

from penstock.worker.bundled.training.corpus.document import (
    Dialogue,
    Document,
    Passage,
    ToolSpec,
    Turn,
    dumps,
)

BOS, START, END, END_OF_TEXT = "<|bos|>", "<|im_start|>", "<|im_end|>", "<|endoftext|>"

# What users write is drawn at random, so there is little to learn from guessing it.
PROMPT_SHARE, ANSWER_SHARE = 0.1, 1.0

_TOOLS_BEFORE = "# Tools\n\nYou may call these functions:\n<tools>\n"
_TOOLS_AFTER = (
    "</tools>\nTo call one, answer with its name and arguments as JSON within "
    "<tool_call></tool_call>."
)


@dataclass(frozen=True, slots=True)
class RenderedPiece:
    """A piece of text, and the share of its tokens that count in the loss."""

    text: str
    share: float


def render(document: Document) -> list[RenderedPiece]:
    """Return a document as pieces of text; a chat comes out as the chat template writes it."""
    if isinstance(document, Passage):
        return [
            RenderedPiece(BOS, 0.0),
            RenderedPiece(document.content + END_OF_TEXT, ANSWER_SHARE),
        ]
    return [RenderedPiece(BOS, 0.0), *_system(document), *_turns(document)]


def _system(document: Dialogue) -> list[RenderedPiece]:
    first = document.turns[0]
    own = first.content if first.role == "system" else ""
    if not document.tools:
        return [_prompt("system", own)] if own else []
    intro = f"{own}\n\n" if own else ""
    return [_prompt("system", f"{intro}{_TOOLS_BEFORE}{_lines(document.tools)}{_TOOLS_AFTER}")]


def _lines(tools: tuple[ToolSpec, ...]) -> str:
    return "".join(f"{dumps(tool.as_json())}\n" for tool in tools)


def _turns(document: Dialogue) -> list[RenderedPiece]:
    return [piece for turn in document.turns if turn.role != "system" for piece in _turn(turn)]


def _turn(turn: Turn) -> list[RenderedPiece]:
    if turn.role == "assistant":
        return [
            RenderedPiece(f"{START}assistant\n", 0.0),
            RenderedPiece(turn.content + END, ANSWER_SHARE),
            RenderedPiece("\n", 0.0),
        ]
    if turn.role == "tool":
        return [_prompt("user", f"\n<tool_response>\n{turn.content}\n</tool_response>", "")]
    return [_prompt(turn.role, turn.content)]


def _prompt(role: str, content: str, separator: str = "\n") -> RenderedPiece:
    return RenderedPiece(f"{START}{role}{separator}{content}{END}\n", PROMPT_SHARE)

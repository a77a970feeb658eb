"""Writes the texts that `penstock quantize` reads where none are given: `calibration.jsonl`.

    python -m penstock.worker.bundled.training.calibration

They are the corpus's, of a seed that neither training nor a measurement has.
"""

import json
from itertools import islice

from penstock.worker.bundled.paths import CALIBRATION_TEXTS
from penstock.worker.bundled.training.corpus.document import Dialogue, Document, Json
from penstock.worker.bundled.training.corpus.mixture import documents

SEED = 4711
NUM_DOCUMENTS = 800


def write() -> None:
    lines = [json.dumps(_fields(document)) for document in islice(documents(SEED), NUM_DOCUMENTS)]
    CALIBRATION_TEXTS.write_text("".join(f"{line}\n" for line in lines))


def _fields(document: Document) -> dict[str, Json]:
    """Return a document as a line has it: a text, or messages and tools."""
    if not isinstance(document, Dialogue):
        return {"text": document.content}
    messages = [{"role": turn.role, "content": turn.content} for turn in document.turns]
    tools = [tool.as_json() for tool in document.tools]
    return {"messages": messages, **({"tools": tools} if tools else {})}


if __name__ == "__main__":
    write()

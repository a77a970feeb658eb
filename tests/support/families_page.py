"""Compare every family that transformers has, and write what was found: `make families`.

`make families FAMILIES=seeing` writes the table of models that see alone.

docs/families.md gets a row for each; worker/models/families/compared.py names those served.
"""

import os
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

os.environ["TRITON_INTERPRET"] = "1"
ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "support"))

import torch  # noqa: E402
import transformers  # noqa: E402
from huggingface_hub.errors import StrictDataclassError  # noqa: E402

import families  # noqa: E402
from penstock.worker.models import impl  # noqa: E402
from penstock.worker.models.contract.spec import ModelSpec  # noqa: E402
from penstock.worker.models.families.seeing import SEEING  # noqa: E402
from penstock.worker.models.folder.errors import ModelError, UnsupportedFamily  # noqa: E402
from penstock.worker.models.native.config import FAMILIES as NATIVE  # noqa: E402
from penstock.worker.models.transformers.transformers_model import plan_transformers_model  # noqa: E402

PAGE = ROOT / "docs" / "families.md"
NAMES = ROOT / "worker/models/families/compared.py"
FAMILIES_MARKS = "<!-- made -->", "<!-- end -->"
SEEING_MARKS = "<!-- made of models that see -->", "<!-- end of models that see -->"
# Of a configuration that cannot be, or lacks a library.
_FAILURES = (
    ArithmeticError, AttributeError, ImportError, LookupError, NotImplementedError, RuntimeError,
    StrictDataclassError, TypeError, ValueError,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Row:
    """What was found of a family.

    native, difference  from transformers, of our own decoder and of its module here; None where
                        it does not compute the family
    """

    family: str
    difference: float | None
    why: str = ""
    native: float | None = None
    tolerance: float = families.TOLERANCE

    @property
    def is_served(self) -> bool:
        found = self.difference
        return found is not None and max(found, self.native or 0) < self.tolerance

    def line(self) -> str:
        if not self.is_served:
            return f"| `{self.family}` | {self.why} |"
        native = "" if self.native is None else f"{self.native:.1e}"
        return f"| `{self.family}` | {native} | {self.difference:.1e} |"


def compared(family: str) -> Row:
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        try:
            families.usual(family).save_pretrained(folder)
            # As it usually is: a tiny one may lack parts.
            plan_transformers_model(ModelSpec(folder))
        except ModelError as refusal:
            return Row(family, None, _said(refusal))
        except _FAILURES:  # its usual configuration may be none that can be built
            pass
        try:
            families.save(family, folder)
            difference, tolerance = _difference(folder, "transformers")
            native = _difference(folder, "native")[0] if family in NATIVE else None
            families.Played(folder, model_impl="transformers", dtype="bfloat16")  # it runs
        except ModelError as refusal:
            return Row(family, None, _said(refusal))
        except _FAILURES as error:  # each family has rules for its fields
            return Row(family, None, f"not compared: no tiny model of it ({_said(error)})")
    return Row(family, difference, f"differs by {difference:.1e}", native, tolerance)


def _difference(folder: Path, impl: str) -> tuple[float, float]:
    """The difference, and the most that it may be."""
    played = families.Played(folder, model_impl=impl)
    assert played.stats.num_preemptions and played.stats.cached_tokens
    return played.distance(folder), played.tolerance


def _said(error: Exception) -> str:
    words = " ".join(str(error).replace("|", "/").split()).removeprefix("config.json: ")
    words = words.partition(", ")[2] if isinstance(error, UnsupportedFamily) else words
    return words.removesuffix("; it is not served")[:110] or type(error).__name__


def main() -> int:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    impl.DIFFERING_FAMILIES = frozenset()  # they are compared again
    asked = sys.argv[1:] or families.FAMILIES
    if asked == ["seeing"] or asked == families.FAMILIES:
        _replace(SEEING_MARKS, _seeing_table())
    if asked == ["seeing"]:
        return 0
    rows = []
    for number, family in enumerate(asked, 1):
        began_s = time.monotonic()
        rows.append(compared(family))
        took = f"{time.monotonic() - began_s:.1f} s"
        print(f"{number:3} of {len(asked)}  {rows[-1].line()}  {took}", flush=True)
    if asked == families.FAMILIES:
        _write(rows)
    return 0


def _write(rows: list[Row]) -> None:
    served = [row for row in rows if row.is_served]
    _replace(FAMILIES_MARKS, _tables(rows, served))
    differing = [row for row in rows if row.difference is not None and not row.is_served]
    NAMES.write_text(
        '"""The families that were compared with transformers: `make families` writes this."""\n\n'
        + _set("COMPARED_FAMILIES", served)
        + _set("DIFFERING_FAMILIES", differing)
    )


def _replace(marks: tuple[str, str], lines: Iterable[str]) -> None:
    """Replace what the page has between two marks."""
    begin, end = marks
    before, _, rest = PAGE.read_text().partition(begin)
    PAGE.write_text("\n".join([before + begin, *lines, end]) + rest.partition(end)[2])


def _seeing_table() -> Iterator[str]:
    yield "| model | text | native |"
    yield "|---|---|---|"
    for name in sorted(SEEING):
        with TemporaryDirectory() as temporary:
            families.save(name, Path(temporary))
            text = families.usual(name).get_text_config().model_type
            difference, _ = _difference(Path(temporary), "native")
        print(line := f"| `{name}` | `{text}` | {difference:.1e} |", flush=True)
        yield line


def _set(name: str, rows: list[Row]) -> str:
    names = "".join(f'        "{row.family}",\n' for row in rows)
    return f"{name} = frozenset(\n    {{\n{names}    }}\n)\n"


def _tables(rows: list[Row], served: list[Row]) -> Iterator[str]:
    native = sum(row.native is not None for row in served)
    yield f"transformers {transformers.__version__} has {len(rows)} families; {len(served)} are"
    yield f"served, {native} of them natively. Their largest differences:\n"
    yield "| family | native | transformers |"
    yield "|---|---|---|"
    yield from (row.line() for row in served)
    yield "\n| family | why it is not served |"
    yield "|---|---|"
    yield from (row.line() for row in rows if not row.is_served)


if __name__ == "__main__":
    sys.exit(main())

"""The pages that are made of the code, and a file of the chart; run as a program it writes them."""

import ast
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import fill

ROOT = Path(__file__).parents[2]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from prometheus_client.core import Metric  # noqa: E402
from pydantic.fields import FieldInfo  # noqa: E402

from penstock.compose.acl import ROLES, line  # noqa: E402
from penstock.compose.local import LocalSettings  # noqa: E402
from penstock.gateway.housekeeping import main as housekeeping  # noqa: E402
from penstock.gateway.metrics.metrics import Metrics  # noqa: E402
from penstock.gateway.process import settings as gateway  # noqa: E402
from penstock.schemas.params.sampling import SamplingParams  # noqa: E402
from penstock.schemas.process.start import Settings  # noqa: E402
from penstock.worker.external.dialect import DIALECTS, FALLBACK  # noqa: E402
from penstock.worker.external.vllm_engine import UNSUPPORTED_FIELDS as VLLM_LACKS  # noqa: E402
from penstock.worker.process.settings import WorkerSettings  # noqa: E402

COMMANDS: dict[str, type[Settings]] = {
    "worker": WorkerSettings,
    "gateway": gateway.GatewaySettings,
    "housekeeping": housekeeping.HousekeepingSettings,
    "up": LocalSettings,
}
ROOMS = ("schemas", "worker", "gateway", "compose", "loadtest")
WIDTH = 118
INHERITED = list(Settings.model_fields)
RELOADABLE = {
    gateway.GatewaySettings: gateway.RELOADABLE,
    housekeeping.HousekeepingSettings: housekeeping.RELOADABLE,
}


def settings_page() -> str:
    lines = [
        "# Settings",
        "",
        fill(
            "Each is a flag, as `--max-model-len`; a variable, as `PENSTOCK_MAX_MODEL_LEN`; and a"
            " key of the YAML file of `--config`, as `max_model_len`. The command line wins, then"
            " the environment, then the file. `penstock serve` takes those of `up`, `worker` and"
            " `gateway`. Gateway and housekeeping take those that are marked, and their log's level"
            " and form, anew on SIGHUP"
            " ([Operating](operating.md#change-settings-of-what-runs)). This page"
            " is made of the code by `tests/support/reference_pages.py`.",
            WIDTH,
        ),
    ]
    lines += ["", "## Of every command", "", *_table(Settings, INHERITED)]
    for command, settings in COMMANDS.items():
        own = [name for name in settings.model_fields if name not in INHERITED]
        lines += ["", f"## penstock {command}", "", *_table(settings, own)]
    return "\n".join([*lines, ""])


def _table(settings: type[Settings], names: list[str]) -> Iterator[str]:
    yield "| flag | default | |"
    yield "|---|---|---|"
    for name in names:
        field = settings.model_fields[name]
        if not name.startswith("fake_"):
            flag = f"`--{name.replace('_', '-')}`"
            if name in RELOADABLE.get(settings, ()):
                flag += " (SIGHUP)"
            yield f"| {flag} | {_default(field)} | {_told(field)} |"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if field.default_factory is not None:
        made = field.default_factory() if field.annotation in (list, dict) else None
        return f"`{made}`" if made else ""
    if field.default is None or field.default == "":
        return ""
    value = field.default
    shown = Path(value).name if isinstance(value, str) and value.startswith("/") else str(value)
    return f"`{str(shown).lower() if isinstance(value, bool) else shown}`"


def _told(field: FieldInfo) -> str:
    return (field.description or "").replace("|", "\\|")


def every_setting() -> str:
    """A module that a process reads without pydantic, and without the commands of the settings."""
    names = fill(" ".join(sorted(_setting_names())), 100)
    doc = "The names of all settings, made of the code by `tests/support/reference_pages.py`."
    return f'"""{doc}"""\n\nSETTINGS = """\n{names}\n"""\n'


def _setting_names() -> set[str]:
    """The fields of each class that is made from `Settings`, and of what else it is made of."""
    paths = [path for room in ROOMS for path in (ROOT / room).rglob("*.py")]
    nodes = [node for path in paths for node in ast.walk(ast.parse(path.read_text()))]
    classes = {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}
    bases = {name: {ast.unparse(base) for base in classes[name].bases} for name in classes}
    of_commands = {"Settings"}
    while below := {name for name in classes if bases[name] & of_commands} - of_commands:
        of_commands |= below
    while (
        above := {base for name in of_commands for base in bases[name] & classes.keys()}
        - of_commands
    ):
        of_commands |= above
    return {name for each in of_commands for name in map(_setting_name, classes[each].body)} - {""}


def _setting_name(node: ast.stmt) -> str:
    """The name by which a setting is given; empty: it is none."""
    if not isinstance(node, ast.AnnAssign) or "ClassVar" in ast.unparse(node.annotation):
        return ""
    given = node.value.keywords if isinstance(node.value, ast.Call) else []
    alias = [ast.literal_eval(each.value) for each in given if each.arg == "alias"]
    return str(alias[0]) if alias else ast.unparse(node.target)


def metrics_page() -> str:
    lines = [
        "# Metrics",
        "",
        fill(
            "What `/metrics` of a gateway publishes, in Prometheus' form. Names that begin with"
            " `vllm:` are vLLM's, for dashboards that know them. Responses, refusals and ends are"
            " those that this gateway saw; all else is of the queue and its workers, so that one"
            " gateway is enough to ask. A worker of several names has its engine's figures once,"
            " under the first; tokens, latencies and sizes are of each name's own jobs. This page"
            " is made of the code by `tests/support/reference_pages.py`.",
            WIDTH,
        ),
        "",
        "| metric | kind | |",
        "|---|---|---|",
    ]
    metrics = Metrics()
    for metric in sorted(metrics.families(), key=lambda each: each.name):
        lines.append(f"| `{_wire_name(metric)}` | {metric.type} | {metric.documentation} |")
    return "\n".join([*lines, ""])


def _wire_name(metric: Metric) -> str:
    return metric.name + ("_total" if metric.type == "counter" else "")


def chart_users() -> str:
    """The bundled Redis's users; for the digest of a password stands `ROLE-password`."""
    lines = [
        re.sub("#[0-9a-f]{64}", f"#{role.name}-password", line(role, "", has_waitaof=True))
        for role in ROLES
    ]
    return "\n".join(["user default off", *lines, ""])


ENGINES = {
    "`vllm`": None,
    "`openai`: vLLM, Penstock": DIALECTS["vllm"],
    "SGLang": DIALECTS["sglang"],
    "llama.cpp": DIALECTS["llamacpp"],
    "any other": FALLBACK,
}
STRUCTURES = ("json", "regex", "choice", "grammar")
EVERYWHERE = {  # done above the engine, or by every server
    "n",
    "max_tokens",
    "stop",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "structured_outputs",
}


def engines_page() -> str:
    """The page as it is, with its table made anew."""
    page = (ROOT / "docs/engines.md").read_text()
    before, _, rest = page.partition("<!-- made -->\n")
    return (
        f"{before}<!-- made -->\n{_engines_table()}<!-- end -->{rest.partition('<!-- end -->')[2]}"
    )


def _engines_table() -> str:
    names = [name for name in SamplingParams.model_fields if name not in EVERYWHERE]
    names += [f"structured_outputs.{kind}" for kind in STRUCTURES]
    lines = [
        f"| | {' | '.join(['`native`', *ENGINES])} |",
        "|---" * (len(ENGINES) + 2) + "|",
    ]
    for name in names:
        refused = [VLLM_LACKS if each is None else each.unsupported for each in ENGINES.values()]
        obeyed = [name not in each for each in refused]
        cells = ["yes" if each else "refused" for each in (True, *obeyed)]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    told = [
        "tokens" if each is None or each.tells != "text" else "text" for each in ENGINES.values()
    ]
    lines.append(f"| goes on elsewhere from | {' | '.join(['tokens', *told])} |")
    salted = [each is None or each.salt is not None for each in ENGINES.values()]
    cells = ["yes" if each else "no" for each in (True, *salted)]
    lines.append(f"| prefix caches apart by tenant | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


PAGES: dict[str, Callable[[], str]] = {
    "docs/settings.md": settings_page,
    "schemas/process/every_setting.py": every_setting,
    "docs/engines.md": engines_page,
    "docs/metrics.md": metrics_page,
    "compose/chart/files/users.acl": chart_users,
}

if __name__ == "__main__":
    for name, made in PAGES.items():
        (ROOT / name).write_text(made())

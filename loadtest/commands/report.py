"""`penstock bench report A.json ..`: a page of one result or of several, in one file."""

from collections.abc import Sequence
from pathlib import Path

from pydantic import Field
from pydantic_settings import CliPositionalArg

from penstock.loadtest.errors import BadOption
from penstock.loadtest.report.page import write_report
from penstock.loadtest.report.result_file import ResultFile
from penstock.schemas.process.start import Settings, load_settings

PROGRAM = "penstock bench report"


class ReportSettings(Settings):
    """A page of results, one HTML file that loads nothing: throughput against latency, the
    distributions of TTFT and ITL, the queue over time, and the slowest requests with the ids of
    their jobs and traces. The last three are of `serve --save-result --save-detailed`.
    """

    results: CliPositionalArg[list[Path]] = Field(description="files of results")
    output: Path = Field(Path("report.html"), description="the page")


def main(argv: Sequence[str]) -> int:
    settings = load_settings(ReportSettings, PROGRAM, argv)
    files = [ResultFile.read(path) for path in settings.results]
    try:
        write_report(settings.output, files)
    except OSError as error:
        raise BadOption(f"--output: {settings.output}: {error.strerror}") from error
    print(settings.output)
    return 0

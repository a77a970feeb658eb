"""`penstock prebuild`: compiles the CPU operations ahead, for an image or a wheel.

Then no compiler is needed where they are used, and nothing is compiled at the first start.
"""

import sys
from collections.abc import Sequence
from typing import Annotated

from pydantic import BeforeValidator, Field
from pydantic_settings import NoDecode

from penstock.kernels.cpu.compile import Unusable
from penstock.kernels.cpu.prebuilt import levels, prebuild
from penstock.schemas.process.start import Settings, load_settings, words_of

PROGRAM = "penstock prebuild"


class PrebuildSettings(Settings):
    """Compile the CPU operations for every level of this kind of processor, beside their sources.

    A worker takes the best one that its processor has.
    """

    levels: Annotated[list[str], NoDecode, BeforeValidator(words_of)] = Field(
        default_factory=list,
        description="these alone, of " + ", ".join(level.name for level in levels()),
    )


def main(argv: Sequence[str]) -> int:
    settings = load_settings(PrebuildSettings, PROGRAM, argv)
    by_name = {level.name: level for level in levels()}
    if strange := set(settings.levels) - set(by_name):
        print(
            f"{PROGRAM}: --levels: {min(strange)} is none of {', '.join(by_name)}", file=sys.stderr
        )
        return 2
    try:
        for file in prebuild([by_name[name] for name in settings.levels or by_name]):
            print(f"{file.stat().st_size / 1000:>4.0f} kB  {file}", flush=True)
    except Unusable as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The rooms stand beside `penstock/` in the tree, and are packages of it where they are installed.

All else is in pyproject.toml, which cannot say this of the folders of a room.
"""

from pathlib import Path

from setuptools import find_namespace_packages, setup

ROOMS = {path.parent.name for path in Path().glob("*/__init__.py")} - {"penstock"}
NO_PACKAGES = ["worker.bundled.training*", "compose.chart*", "loadtest.lab*", "loadtest.results*"]
FOLDERS = find_namespace_packages(exclude=NO_PACKAGES)

setup(
    package_dir={f"penstock.{room}": room for room in ROOMS},
    packages=["penstock"]
    + [f"penstock.{folder}" for folder in FOLDERS if folder.partition(".")[0] in ROOMS],
)

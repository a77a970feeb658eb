"""The Helm chart as Helm renders it, and its containers as processes of this machine."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import helm_python
import yaml

from paths import ROOT

CHART = ROOT / "compose" / "chart"
RELEASE, NAMESPACE = "penstock", "llm"
TRIAL = {"redis": {"bundled": True}}
Manifest = dict


@cache
def _loaded() -> helm_python.Chart:
    return helm_python.Chart.load(CHART)


def render(values: Mapping[str, object]) -> list[Manifest]:
    """All manifests of a release. Raises helm_python.HelmError for wrong values."""
    texts = _loaded().render(dict(values), name=RELEASE, namespace=NAMESPACE)
    return [
        manifest
        for name, text in texts.items()
        if name.endswith(".yaml")
        for manifest in yaml.load_all(text, yaml.CSafeLoader)  # eight times as fast
        if manifest
    ]


def notes(values: Mapping[str, object]) -> str:
    texts = _loaded().render(dict(values), name=RELEASE, namespace=NAMESPACE)
    return texts["penstock/templates/NOTES.txt"]


def of_kind(manifests: list[Manifest], kind: str) -> dict[str, Manifest]:
    """Those of one kind by name."""
    return {each["metadata"]["name"]: each for each in manifests if each["kind"] == kind}


def templates(manifests: list[Manifest]) -> Iterator[Manifest]:
    """The templates of all pods."""
    for manifest in manifests:
        if manifest["kind"] in ("Deployment", "StatefulSet"):
            yield manifest["spec"]["template"]


def container(manifests: list[Manifest], name: str) -> Manifest:
    """The container of that name, which is its part's."""
    found = [each for pod in templates(manifests) for each in pod["spec"]["containers"]]
    return next(each for each in found if each["name"] == name)


class Places:
    """Where on this machine what a pod has is: the Secret's files, folders, and Redis."""

    def __init__(self, manifests: list[Manifest], folder: Path, redis_port: int) -> None:
        (made,) = of_kind(manifests, "Secret").values()
        self._secret: dict[str, str] = made["stringData"]
        self.mounts = {f"/{name}": str(folder / name) for name in ("secrets", "files", "data")}
        for each in self.mounts.values():
            Path(each).mkdir()
        for name, text in self._secret.items():
            here = text.replace("penstock-redis:6379", f"127.0.0.1:{redis_port}")
            (folder / "secrets" / name).write_text(here)

    def given(self, text: str) -> str:
        for there, here in self.mounts.items():
            text = text.replace(there, here)
        return text

    def environment(self, container: Manifest) -> dict[str, str]:
        """This process's own, without settings, and the container's."""
        kept = {name: each for name, each in os.environ.items() if not name.startswith("PENSTOCK_")}
        for each in container["env"]:
            if "value" in each:
                kept[each["name"]] = self.given(each["value"])
            else:
                kept[each["name"]] = self._secret[each["valueFrom"]["secretKeyRef"]["key"]]
        return kept

    def start(self, container: Manifest, log: Path, **env: str) -> subprocess.Popen[bytes]:
        """Start what the image's entry point would: `penstock` with the container's words."""
        words = [self.given(word) for word in container["args"]]
        with log.open("w") as stream:
            return subprocess.Popen(
                [sys.executable, "-m", "penstock.compose.cli", *words],
                env=self.environment(container) | env,
                stdout=stream,
                stderr=stream,
                start_new_session=True,
            )

    def probe(self, container: Manifest, probe: str, **env: str) -> int:
        """The exit status of a probe that is a command."""
        command = [self.given(word) for word in container[probe]["exec"]["command"]]
        ours = f"{sys.executable} -m penstock.compose.cli "
        command = [word.replace("penstock top", f"{ours}top") for word in command]
        return subprocess.run(
            command, env=self.environment(container) | env, stderr=subprocess.DEVNULL, check=False
        ).returncode

"""What KEDA and a HorizontalPodAutoscaler make of a ScaledObject, from what gateways publish."""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

Labels = frozenset[tuple[str, str]]
Vector = dict[Labels, float]
Sample = tuple[str, dict[str, str], float]
TOKEN = re.compile(r'\s*([\w:]+|\{(?:"(?:[^"\\]|\\.)*"|[^"}])*\}|[()+,])')
MATCHER = re.compile(r'(\w+)(=~|=)("(?:[^"\\]|\\.)*")')
TOLERANCE = 0.1  # the HPA's: so near the target nothing is changed


def scraped(text: str, **labels: str) -> list[Sample]:
    """The samples of a target, with the labels that Prometheus adds."""
    return [
        (sample.name, sample.labels | labels, sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    ]


class Query:
    """A query in PromQL, as far as the chart uses it: selectors, +, sum and max."""

    def __init__(self, text: str) -> None:
        self.text = text

    def value(self, samples: Sequence[Sample]) -> float | None:
        """The one value, or None where nothing is found. Raises ValueError if there are more."""
        self._tokens = TOKEN.findall(self.text)
        assert not TOKEN.sub("", self.text).strip(), self.text
        found = self._sum(samples)
        if len(found) > 1 or self._tokens:
            raise ValueError(f"{found} of {self.text}, {self._tokens} are left")
        return next(iter(found.values()), None)

    def _take(self, *expected: str) -> str:
        token = self._tokens.pop(0)
        assert not expected or token in expected, f"{token} in {self.text}"
        return token

    def _sum(self, samples: Sequence[Sample]) -> Vector:
        total = self._term(samples)
        while self._tokens and self._tokens[0] == "+":
            self._take()
            other = self._term(samples)
            total = {key: total[key] + other[key] for key in total.keys() & other.keys()}
        return total

    def _term(self, samples: Sequence[Sample]) -> Vector:
        word = self._take()
        if word not in ("sum", "max"):
            return self._selected(word, samples)
        by = list[str]()
        if self._tokens[0] == "by":
            self._take()
            self._take("(")
            while (token := self._take()) != ")":
                by += [token] if token != "," else []
        self._take("(")
        inner = self._sum(samples)
        self._take(")")
        groups: dict[Labels, list[float]] = {}
        for labels, value in inner.items():
            key = frozenset(each for each in labels if each[0] in by)
            groups.setdefault(key, []).append(value)
        reduce = {"sum": sum, "max": max}[word]
        return {key: float(reduce(values)) for key, values in groups.items()}

    def _selected(self, name: str, samples: Sequence[Sample]) -> Vector:
        braces = self._take() if self._tokens and self._tokens[0].startswith("{") else ""
        matchers = [
            (label, kind, re.sub(r"\\(.)", r"\1", text[1:-1]))
            for label, kind, text in MATCHER.findall(braces)
        ]

        def fits(labels: dict[str, str]) -> bool:
            return all(
                labels.get(label, "") == wanted
                if kind == "="
                else re.fullmatch(wanted, labels.get(label, ""))
                for label, kind, wanted in matchers
            )

        return {
            frozenset(labels.items()): value
            for at, labels, value in samples
            if at == name and fits(labels)
        }


@dataclass
class Autoscaler:
    """KEDA decides between none and one, the HPA from one on. Times are in seconds."""

    spec: dict
    now_s: float
    recommended: list[tuple[float, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.active_s = self.now_s  # a new one waits for initialCooldownPeriod, which is as long
        self.trigger = self.spec["triggers"][0]["metadata"]
        self.query = Query(self.trigger["query"])

    def wanted(self, now_s: float, current: int, samples: Iterable[Sample]) -> int:
        """How many workers there should be. Where the query finds nothing, as many as there are."""
        load = self.query.value(list(samples))
        if load is None:
            assert self.trigger["ignoreNullValues"] == "false"
            return current
        least, is_active = self.spec["minReplicaCount"], load > 0
        if is_active:
            self.active_s = now_s
        if current == 0:
            return max(1, least) if is_active else least
        if not is_active and least == 0 and now_s - self.active_s > self.spec["cooldownPeriod"]:
            self.recommended.clear()
            return 0
        return self._by_load(now_s, current, load / float(self.trigger["threshold"]))

    def _by_load(self, now_s: float, current: int, load: float) -> int:
        is_near = abs(load / current - 1) <= TOLERANCE
        wanted = current if is_near else math.ceil(load)
        wanted = min(max(wanted, 1, self.spec["minReplicaCount"]), self.spec["maxReplicaCount"])
        config = self.spec["advanced"]["horizontalPodAutoscalerConfig"]
        window_s = config["behavior"]["scaleDown"]["stabilizationWindowSeconds"]
        self.recommended.append((now_s, wanted))
        self.recommended = [each for each in self.recommended if each[0] >= now_s - window_s]
        if wanted < current:
            return min(current, max(each for _, each in self.recommended))
        return min(wanted, max(current + 4, current * 2))

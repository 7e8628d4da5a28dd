"""A server's metrics endpoint, read by Prometheus' own parser."""

from __future__ import annotations

import urllib.request
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from deepinfer_backend.triton.server import TritonServer

Labels = frozenset[tuple[str, str]]


@dataclass(frozen=True)
class Scrape:
    """`kinds`: "gauge", "counter" or "histogram" by a family's full name; `samples`: (series' name, labels) → value."""

    kinds: dict[str, str]
    descriptions: dict[str, str]
    samples: dict[tuple[str, Labels], float]

    def value(self, name: str, **labels: str) -> float:
        """Of the one series that has these labels, and perhaps others; 0 if there is none."""
        wanted = labels.items()
        (found,) = [
            value for (each, has), value in self.samples.items() if each == name and wanted <= dict(has).items()
        ] or [0.0]
        return found

    def label_names(self, name: str) -> set[str]:
        """Of all series with this name; empty if there is none."""
        return {label for each, labels in self.samples if each == name for label, _ in labels}

    def label_values(self, name: str, label: str) -> set[str]:
        return {value for each, labels in self.samples if each == name for key, value in labels if key == label}

    def names(self) -> set[str]:
        return {name for name, _ in self.samples}


def scrape(server: TritonServer) -> Scrape:
    with urllib.request.urlopen(f"http://localhost:{server.metrics_port}/metrics", timeout=5) as response:
        text = response.read().decode()
    kinds, descriptions, samples = {}, {}, {}
    for family in text_string_to_metric_families(text):
        # The parser takes the ending off a counter's name.
        name = next((s.name for s in family.samples), family.name) if family.type == "counter" else family.name
        kinds[name], descriptions[name] = family.type, family.documentation
        for sample in family.samples:
            samples[sample.name, frozenset(sample.labels.items())] = sample.value
    return Scrape(kinds, descriptions, samples)

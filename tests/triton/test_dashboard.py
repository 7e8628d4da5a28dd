"""The Grafana dashboard shows every metric of ours, and asks for nothing that a real scrape does not have."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest

from deepinfer_backend.triton.metric_families import FAMILIES
from deepinfer_backend.triton.server import TritonServer
from tests.support.metrics_scrape import Scrape, scrape
from tests.support.triton_client import http_generate
from tests.support.triton_server import wait_until

DASHBOARD: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "deploy" / "grafana" / "deepinfer.json").read_text(encoding="utf-8")
)
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
EXPRESSIONS: list[str] = [target["expr"] for panel in PANELS for target in panel.get("targets", [])]
VARIABLES: dict[str, dict[str, Any]] = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
_LABEL_VALUES = re.compile(r"label_values\((.+), (\w+)\)")


@pytest.fixture(scope="module")
def scraped(server: TritonServer) -> Scrape:
    assert http_generate(server, text_input="x", max_tokens=3)[0] == 200
    wait_until(lambda: "deepinfer_requests_running" in scrape(server).names(), 10, "the engine's metrics")
    return scrape(server)


def parse(expression: str) -> Any:
    """Prometheus' syntax, once Grafana has put in its variables."""
    return promql_parser.parse(expression.replace("$__rate_interval", "1m"))


def parts(node: Any) -> Iterator[Any]:
    """An expression and all that it is made of."""
    yield node
    for name in ("lhs", "rhs", "expr", "param", "vector_selector"):
        if (child := getattr(node, name, None)) is not None:
            yield from parts(child)
    for child in getattr(node, "args", None) or []:
        yield from parts(child)


def selectors(expression: str) -> list[Any]:
    return [part for part in parts(parse(expression)) if isinstance(part, promql_parser.VectorSelector)]


def base_name(series: str) -> str:
    return re.sub("_(bucket|sum|count)$", "", series)


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_an_expression_asks_for_series_and_labels_that_are_there(scraped: Scrape, expression: str) -> None:
    found = selectors(expression)
    assert found
    for selector in found:
        assert selector.name in scraped.names()
        matchers = {matcher.name: matcher for matcher in selector.matchers.matchers}
        assert {"model", "version"} <= matchers.keys() <= scraped.label_names(selector.name)
        for variable in ("model", "version"):
            assert matchers[variable].value == f"${variable}"
        for name in matchers.keys() - {"model", "version"}:
            values = scraped.label_values(selector.name, name)
            assert set(matchers[name].value.split("|")) <= values
    for part in parts(parse(expression)):
        if isinstance(part, promql_parser.AggregateExpr) and part.modifier is not None:
            labels = {label for selector in selectors(str(part)) for label in scraped.label_names(selector.name)}
            assert set(part.modifier.labels) <= labels


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_an_expression_treats_a_metric_as_what_it_is(expression: str) -> None:
    """Counters and histograms only grow: their rate is shown. A gauge has none."""
    kinds = {family.name: family.kind.value for family in FAMILIES}
    inside_rate = {
        part.args[0].vector_selector.name
        for part in parts(parse(expression))
        if isinstance(part, promql_parser.Call) and part.func.name == "rate"
    }
    for selector in selectors(expression):
        assert (kinds[base_name(selector.name)] != "gauge") == (selector.name in inside_rate)
        assert selector.name.endswith("_bucket") == ("histogram_quantile" in expression)


def test_every_metric_is_on_it() -> None:
    shown = {base_name(selector.name) for expression in EXPRESSIONS for selector in selectors(expression)}
    assert shown == {family.name for family in FAMILIES}


def test_model_and_version_can_be_chosen(scraped: Scrape) -> None:
    assert list(VARIABLES) == ["datasource", "model", "version"]
    for name in ("model", "version"):
        match = _LABEL_VALUES.fullmatch(VARIABLES[name]["query"]["query"])
        assert match is not None
        assert match[2] == name
        (selector,) = selectors(match[1])
        assert match[2] in scraped.label_names(selector.name)


def test_panels_are_what_grafana_expects() -> None:
    assert DASHBOARD["uid"]
    assert DASHBOARD["title"]
    assert DASHBOARD["schemaVersion"] >= 36
    ids = [panel["id"] for panel in PANELS]
    assert len(ids) == len(set(ids))
    titles = [panel["title"] for panel in PANELS]
    assert all(titles)
    assert len(titles) == len(set(titles))
    for panel in PANELS:
        assert panel["type"] in ("row", "timeseries", "stat")
        if panel["type"] == "row":
            continue
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert panel["fieldConfig"]["defaults"]["unit"]
        references = [target["refId"] for target in panel["targets"]]
        assert references
        assert len(references) == len(set(references))


def test_panels_do_not_lie_on_each_other() -> None:
    places = [tuple(panel["gridPos"][key] for key in "xywh") for panel in PANELS]
    assert all(x >= 0 and x + w <= 24 for x, _, w, _ in places)
    for (x1, y1, w1, h1), (x2, y2, w2, h2) in itertools.combinations(places, 2):
        assert x1 + w1 <= x2 or x2 + w2 <= x1 or y1 + h1 <= y2 or y2 + h2 <= y1

"""The README's tables are what the code says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from deepinfer_backend.config import EngineConfig
from deepinfer_backend.field_facts import FieldFacts, describe_fields
from deepinfer_backend.sampling_params import SamplingParams
from deepinfer_backend.triton.metric_families import FAMILIES, MetricFamily
from deepinfer_backend.triton.model_config import INPUTS, OUTPUTS, RETURN_INPUTS

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
FIELDS = describe_fields(SamplingParams)


def rows(heading: str) -> dict[str, list[str]]:
    """The table whose first heading is this: name → cells; a row with several names counts for each."""
    table = README.partition(f"\n| {heading} |")[2].partition("\n\n")[0]
    found = {}
    for line in table.splitlines()[2:]:
        cells = [cell.strip().replace("\\|", "|").replace("\\*", "") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        found.update({name: cells for name in re.findall(r"`(\w+)`", cells[0])})
    return found


def test_every_sampling_field_is_there_once() -> None:
    assert list(rows("sampling field")) == [field.name for field in FIELDS]


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.name)
def test_a_sampling_field_is_described_as_the_code_has_it(field: FieldFacts) -> None:
    _, type_name, default, limits, meaning, origin = rows("sampling field")[field.name]
    assert (type_name, default, meaning) == (field.type_name, field.default, field.description)
    assert limits.startswith(field.limits)
    assert origin


def test_limits_of_the_configuration_are_the_defaults() -> None:
    config = EngineConfig()
    named = re.findall(r"`(max_\w+)` \((\d+)\)", "".join(cells[3] for cells in rows("sampling field").values()))
    assert {name: int(limit) for name, limit in named} == {name: getattr(config, name) for name, _ in named}
    assert len(named) == 8


def test_every_tensor_is_there_with_its_type_and_shape() -> None:
    shown = {**rows("input"), **rows("output")}
    for spec in (*INPUTS, *OUTPUTS):
        if spec.name not in RETURN_INPUTS:
            assert shown[spec.name][1] == f"{spec.data_type.removeprefix('TYPE_')} [{spec.dims[0]}]"
    assert set(rows("output")) == {spec.name for spec in OUTPUTS}


def test_additional_outputs_are_asked_for_as_the_code_has_it() -> None:
    shown = rows("output")
    for name, outputs in RETURN_INPUTS.items():
        assert [shown[output][2] for output in outputs] == [f"`{name}`"] * len(outputs)


def test_every_metric_is_there_once() -> None:
    assert list(rows("metric")) == [family.name for family in FAMILIES]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_metric_is_described_as_the_code_has_it(family: MetricFamily) -> None:
    label = f"`{family.label}`: {', '.join(family.label_values)}" if family.label else ""
    assert rows("metric")[family.name][1:] == [family.kind.value, label, family.description]


def test_metrics_that_the_page_on_migrating_names_are_there() -> None:
    page = (Path(__file__).parents[1] / "docs" / "migrating.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(deepinfer_\w+)`", page)) - {"deepinfer_backend"}
    assert len(named) > 15
    assert named <= {family.name for family in FAMILIES}

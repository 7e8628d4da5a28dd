"""One command-line option per field of EngineConfig or SamplingParams, made from the fields themselves."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer
from pydantic import BaseModel

from deepinfer_backend.field_facts import FieldFacts, describe_fields


def field_options(
    model: type[BaseModel], parameter: str, panel: str, leave_out: tuple[str, ...] = ()
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Replaces the command's parameter `parameter` by an option per field; it gets a dict of those that were given.

    Values arrive as text and are checked by `model` alone, so that the command line, `model.json` and requests
    accept the same things and refuse the rest in the same words.
    """
    fields = [field for field in describe_fields(model) if field.name not in leave_out]

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def with_fields(**given: Any) -> Any:
            values = {field.name: given.pop(field.name) for field in fields}
            given[parameter] = {name: value for name, value in values.items() if value not in (None, [])}
            return command(**given)

        signature = inspect.signature(command, eval_str=True)
        own = [value for name, value in signature.parameters.items() if name != parameter]
        added = [_option(field, panel) for field in fields]
        with_fields.__signature__ = signature.replace(parameters=[*own, *added])  # type: ignore[attr-defined]
        with_fields.__annotations__ = {value.name: value.annotation for value in (*own, *added)}
        return with_fields

    return decorate


def _option(field: FieldFacts, panel: str) -> inspect.Parameter:
    flag = "--" + field.name.replace("_", "-")
    details = ", ".join(part for part in (field.limits, f"default: {field.default}") if part)
    help_text = f"{field.description} ({details})"
    if field.is_bool:
        kind: Any = bool | None
        option = typer.Option(f"{flag}/--no-{flag[2:]}", help=help_text, rich_help_panel=panel, show_default=False)
    else:
        kind = list[str] | None if field.is_list else str | None
        option = typer.Option(
            flag, help=help_text, rich_help_panel=panel, show_default=False, metavar=f"<{field.type_name}>"
        )
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, option]
    )

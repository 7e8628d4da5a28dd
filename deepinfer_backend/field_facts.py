"""Name, type, limits, default and meaning of a pydantic model's fields, in words: for options, tables and help."""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MaxLen
from pydantic import BaseModel
from pydantic.fields import FieldInfo

_LIMITS: dict[type, Callable[[Any], str]] = {
    Ge: lambda limit: f"≥ {limit.ge}",
    Gt: lambda limit: f"> {limit.gt}",
    Le: lambda limit: f"≤ {limit.le}",
    Lt: lambda limit: f"< {limit.lt}",
    MaxLen: lambda limit: f"at most {limit.max_length}",
}


@dataclass(frozen=True, slots=True)
class FieldFacts:
    """One field as people read about it; `default` is "none" where the field may stay empty."""

    name: str
    type_name: str
    limits: str
    default: str
    description: str
    is_bool: bool
    is_list: bool


def describe_fields(model: type[BaseModel]) -> list[FieldFacts]:
    return [_describe(name, field) for name, field in model.model_fields.items()]


def _describe(name: str, field: FieldInfo) -> FieldFacts:
    type_ = _without_none(field.annotation)
    default = field.get_default(call_default_factory=True, validated_data={})
    return FieldFacts(
        name=name,
        type_name=_type_name(type_),
        limits=_limits(field.metadata),
        default=_default_text(default),
        description=field.description or "",
        is_bool=type_ is bool,
        is_list=get_origin(type_) is list,
    )


def _limits(metadata: list[Any]) -> str:
    limits = {type(limit): limit for limit in metadata if type(limit) in _LIMITS}
    if Ge in limits and Le in limits:
        return f"{limits[Ge].ge} to {limits[Le].le}"
    return ", ".join(_LIMITS[kind](limit) for kind, limit in limits.items())


def _default_text(default: Any) -> str:
    if default is None or default == []:
        return "none"
    return str(default).lower() if isinstance(default, bool) else str(default)


def _without_none(annotation: Any) -> Any:
    if get_origin(annotation) not in (Union, types.UnionType):
        return annotation
    kinds = [kind for kind in get_args(annotation) if kind is not types.NoneType]
    return kinds[0] if len(kinds) == 1 else annotation


def _type_name(type_: Any) -> str:
    origin = get_origin(type_)
    if origin is Literal:
        return " | ".join(str(choice) for choice in get_args(type_))
    if origin is Annotated:
        return _type_name(get_args(type_)[0])
    if origin is list:
        return f"list of {_type_name(get_args(type_)[0])}"
    return getattr(type_, "__name__", str(type_))

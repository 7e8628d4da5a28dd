"""Name, type, limits, default and meaning of a pydantic model's fields, in words: for options, tables and help."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from pydantic import BaseModel
from pydantic.fields import FieldInfo

_LIMITS: dict[type, Callable[[Any], str]] = {
    Ge: lambda limit: f"≥ {limit.ge}",
    Gt: lambda limit: f"> {limit.gt}",
    Le: lambda limit: f"≤ {limit.le}",
    Lt: lambda limit: f"< {limit.lt}",
    MinLen: lambda limit: f"{limit.min_length} or more",
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
    limits = [_limits(field.metadata, unit=_unit(type_)), *_limits_of_each(type_)]
    return FieldFacts(
        name=name,
        type_name=_type_name(type_),
        limits=", ".join(filter(None, limits)),
        default=_default_text(default),
        description=field.description or "",
        is_bool=type_ is bool,
        is_list=get_origin(type_) is list,
    )


def _unit(type_: Any) -> str:
    return " characters" if type_ is str else " entries"


def _limits(metadata: Iterable[Any], unit: str) -> str:
    limits = {type(limit): limit for limit in metadata if type(limit) in _LIMITS}
    if Ge in limits and Le in limits:
        return f"{limits[Ge].ge} to {limits[Le].le}"
    if MinLen in limits and MaxLen in limits:
        return f"{limits[MinLen].min_length} to {limits[MaxLen].max_length}{unit}"
    texts = [_LIMITS[kind](limit) + (unit if kind in (MinLen, MaxLen) else "") for kind, limit in limits.items()]
    return ", ".join(texts)


def _limits_of_each(type_: Any) -> list[str]:
    """Of what a list or an object holds."""
    names = {list: ("each",), dict: ("keys", "values")}.get(get_origin(type_), ())
    held = zip(names, get_args(type_), strict=False)
    limits = {
        name: _limits(kind.__metadata__[0].metadata, _unit(kind.__origin__))
        for name, kind in held
        if _is_annotated(kind)
    }
    return [f"{name} {limit}" for name, limit in limits.items() if limit]


def _default_text(default: Any) -> str:
    if default is None or default in ([], {}):
        return "none"
    return str(default).lower() if isinstance(default, bool) else str(default)


def _without_none(annotation: Any) -> Any:
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) not in (Union, types.UnionType):
        return annotation
    kinds = tuple(kind for kind in get_args(annotation) if kind is not types.NoneType)
    return kinds[0] if len(kinds) == 1 else Union[kinds]  # noqa: UP007 (kinds are known at run time only)


def _is_annotated(type_: Any) -> bool:
    return get_origin(type_) is Annotated


def _type_name(type_: Any) -> str:
    origin = get_origin(type_)
    if origin is Literal:
        return " | ".join(str(choice) for choice in get_args(type_))
    if origin in (Union, types.UnionType):
        return " | ".join(_type_name(kind) for kind in get_args(type_))
    if origin is Annotated:
        return _type_name(get_args(type_)[0])
    if origin is list:
        return f"list of {_type_name(get_args(type_)[0])}"
    if origin is dict or (isinstance(type_, type) and issubclass(type_, BaseModel)):
        return "object"
    return getattr(type_, "__name__", str(type_))

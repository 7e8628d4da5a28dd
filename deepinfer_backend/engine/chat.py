"""Chat messages → the prompt's token ids, through the model's own chat template."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeGuard

from deepinfer_backend.engine.request_limits import check_text
from deepinfer_backend.errors import InvalidRequestError, shown
from deepinfer_backend.models.model_files import one_line

# What a template knows under these names comes from us; only these two of the library's switches are the client's.
_CLIENTS_SWITCHES = frozenset({"add_generation_prompt", "continue_final_message"})
_TEMPLATES_OWN_NAMES = frozenset({"messages", "conversations"})


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation whose form is right: 1 or more messages with a role and a content of text or none.

    A content that was a list of text parts has become one text, its parts joined by line breaks as vLLM does.
    `template_kwargs`: further variables of the template.

    Raises (`from_objects`, `from_json`):
        InvalidRequestError: names the field, the value and what it must be.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    template_kwargs: dict[str, Any]

    @classmethod
    def from_objects(
        cls, messages: Any, tools: Any | None = None, template_kwargs: Mapping[str, Any] | None = None
    ) -> Chat:
        return cls(_check_messages(messages), _check_tools(tools), _check_template_kwargs(template_kwargs))

    @classmethod
    def from_json(cls, messages: str, tools: str | None, template_kwargs: str | None, max_bytes: int) -> Chat:
        """Each text is JSON of at most `max_bytes` in UTF-8."""
        return cls.from_objects(
            read_json("messages", messages, max_bytes),
            None if tools is None else read_json("tools", tools, max_bytes),
            None if template_kwargs is None else read_json("chat_template_kwargs", template_kwargs, max_bytes),
        )

    def tokenize(self, tokenizer: Any, max_chars: int) -> list[int]:
        """The prompt as token ids; the template alone says where it begins, so no second beginning-of-text is added.

        What looks like a special token in a message, a tool or a variable is read as plain text. transformers renders
        templates in jinja2's ImmutableSandboxedEnvironment, with plain JSON data.

        Args:
            tokenizer: a transformers tokenizer, or None.
            max_chars: the most characters that the template may make of it.

        Raises:
            InvalidRequestError: there is no template, it refuses the messages, or what it makes of them is too long.
        """
        if tokenizer is None:
            raise InvalidRequestError("messages: this model has no tokenizer; send input_ids")
        if not tokenizer.chat_template:
            raise InvalidRequestError("messages: this model has no chat template; send text_input")
        # The text is for this check alone: only when tokens are asked for does the library tell the template's special
        # tokens from those in messages.
        check_text("messages", self._apply(tokenizer, tokenize=False), max_chars)
        token_ids: list[int] = self._apply(tokenizer, tokenize=True, sanitize_control_tokens=True)["input_ids"]
        return token_ids

    def _apply(self, tokenizer: Any, **options: bool) -> Any:
        continues = self.template_kwargs.get("continue_final_message", False)
        switches = {"add_generation_prompt": not continues, **self.template_kwargs}
        try:
            return tokenizer.apply_chat_template(self.messages, tools=self.tools, **switches, **options)
        except RecursionError:
            raise InvalidRequestError("messages: nested too deeply") from None
        except Exception as error:  # a template can raise anything
            raise InvalidRequestError(f"messages: the model's chat template refuses them: {one_line(error)}") from error


def read_json(name: str, text: str, max_bytes: int) -> Any:
    """Raises InvalidRequestError: the input `name` is over `max_bytes` in UTF-8, or not JSON."""
    num_bytes = len(text.encode("utf-8", errors="replace"))
    if num_bytes > max_bytes:
        raise InvalidRequestError(f"{name} has {num_bytes} bytes: must have at most {max_bytes}")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise InvalidRequestError(f"{name} is {shown(text)}: not valid JSON ({reason})") from None


def _check_messages(messages: Any) -> list[dict[str, Any]]:
    if not _is_list(messages) or len(messages) == 0:
        raise InvalidRequestError(f"messages is {shown(messages)}: must be a list of at least 1 message")
    return [_check_message(f"messages.{index}", message) for index, message in enumerate(messages)]


def _check_message(name: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequestError(f"{name} is {shown(message)}: must be an object")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidRequestError(f"{name}.role is {shown(role)}: must be a string such as 'user'")
    content = message.get("content")
    if _is_list(content):
        parts = [_check_part(f"{name}.content.{index}", part) for index, part in enumerate(content)]
        content = "\n".join(parts)
    elif content is not None and not isinstance(content, str):
        raise InvalidRequestError(f"{name}.content is {shown(content)}: must be a string, null or a list of text parts")
    return {**message, "content": content}


def _check_part(name: str, part: Any) -> str:
    if not isinstance(part, Mapping):
        raise InvalidRequestError(f"{name} is {shown(part)}: must be an object")
    if part.get("type") != "text":
        raise InvalidRequestError(
            f"{name}.type is {shown(part.get('type'))}: must be 'text' (this model takes no other)"
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidRequestError(f"{name}.text is {shown(text)}: must be a string")
    return text


def _check_tools(tools: Any) -> list[dict[str, Any]] | None:
    if tools is None:
        return None
    if not _is_list(tools):
        raise InvalidRequestError(f"tools is {shown(tools)}: must be a list of objects")
    for index, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise InvalidRequestError(f"tools.{index} is {shown(tool)}: must be an object")
    return [dict(tool) for tool in tools] or None


def _check_template_kwargs(given: Any) -> dict[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise InvalidRequestError(f"chat_template_kwargs is {shown(given)}: must be an object")
    reserved = _reserved_names() - _CLIENTS_SWITCHES
    for name, value in given.items():
        if not isinstance(name, str) or name in reserved:
            raise InvalidRequestError(f"chat_template_kwargs.{shown(name)[1:-1]}: cannot be set by a request")
        if name in _CLIENTS_SWITCHES and not isinstance(value, bool):
            raise InvalidRequestError(f"chat_template_kwargs.{name} is {shown(value)}: must be true or false")
    if all(given.get(name) for name in _CLIENTS_SWITCHES):
        raise InvalidRequestError(
            "chat_template_kwargs.add_generation_prompt is True: must be false when continue_final_message is true"
        )
    return dict(given)


@cache
def _reserved_names() -> frozenset[str]:
    """Every argument of the library's call that is not a variable of the template."""
    from transformers import PreTrainedTokenizerBase

    return _TEMPLATES_OWN_NAMES | set(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)


def _is_list(value: Any) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)

"""Chat messages → the prompt's token ids, through the model's own chat template."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeGuard

from deepinfer_backend.engine.request_limits import check_text
from deepinfer_backend.errors import InvalidRequestError, shown
from deepinfer_backend.media.medium import DATA_URL, Medium, from_object, from_url
from deepinfer_backend.media.prompt import TEMPLATE_SWITCHES, MediaPrompt
from deepinfer_backend.models.model_files import one_line
from deepinfer_backend.models.vision_families import Kind

_KIND_OF_PART: dict[str, Kind] = {"image_url": "image", "video_url": "video", "image": "image", "video": "video"}
_BASE64_RATIO = 2  # characters of a byte: 4/3, and what stands around them
ReadMedium = Callable[[Kind, str, Any], Medium]

# What a template knows under these names comes from us.
_TEMPLATES_OWN_NAMES = frozenset({"messages", "conversations"})


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation whose form is right: 1 or more messages with a role and a content.

    A content is a text, none, or a list of parts {"type": "text", "text": …}, {"type": "image"} and {"type": "video"}.
    The last two stand for `media`, in order.

    `template_kwargs`: further variables of the template.

    Raises (`from_objects`, `from_json`):
        InvalidRequestError: names the field, the value and what it must be.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    template_kwargs: dict[str, Any]
    media: list[Medium]

    @classmethod
    def from_objects(
        cls, messages: Any, tools: Any | None = None, template_kwargs: Mapping[str, Any] | None = None
    ) -> Chat:
        """Media may be whatever a Python program has: `media.medium.from_object`."""
        return cls._checked(messages, tools, template_kwargs, from_object)

    @classmethod
    def from_json(
        cls, messages: str, tools: str | None, template_kwargs: str | None, max_bytes: int, max_media_bytes: int = 0
    ) -> Chat:
        """Each text is JSON of at most `max_bytes` in UTF-8. Data URLs of media, in `messages`, are not counted: what
        they hold may have `max_media_bytes`. Media may be nothing else.
        """
        num_media_chars = _BASE64_RATIO * max_media_bytes if DATA_URL in messages else 0
        chat = cls._checked(
            read_json("messages", messages, max_bytes + num_media_chars),
            None if tools is None else read_json("tools", tools, max_bytes),
            None if template_kwargs is None else read_json("chat_template_kwargs", template_kwargs, max_bytes),
            from_url,
        )
        num_bytes = len(messages.encode()) - sum(len(medium.data) * 4 // 3 for medium in chat.media)
        if num_bytes > max_bytes:
            raise InvalidRequestError(
                f"messages has {num_bytes} bytes besides its media: must have at most {max_bytes}"
            )
        return chat

    @classmethod
    def _checked(
        cls, messages: Any, tools: Any | None, template_kwargs: Mapping[str, Any] | None, read_medium: ReadMedium
    ) -> Chat:
        media: list[Medium] = []
        return cls(
            _check_messages(messages, media, read_medium),
            _check_tools(tools),
            _check_template_kwargs(template_kwargs),
            media,
        )

    def media_prompt(self) -> MediaPrompt:
        """What makes a prompt of it where there are media."""
        return MediaPrompt(
            media=self.media,
            messages=_with_contents(self.messages, _as_parts),
            tools=self.tools,
            template_kwargs=self._template_variables(),
        )

    def tokenize(self, tokenizer: Any, max_chars: int, *, in_parts: bool = False) -> list[int]:
        """The prompt as token ids; the template alone says where it begins, so no second beginning-of-text is added.

        What looks like a special token in a message, a tool or a variable is read as plain text. transformers renders
        templates in jinja2's ImmutableSandboxedEnvironment, with plain JSON data.

        Args:
            tokenizer: a transformers tokenizer, or None.
            max_chars: the most characters that the template may make of it.
            in_parts: the template is one for media too, and gets contents as lists of parts; else as texts, whose parts
                are joined by line breaks as vLLM does.

        Raises:
            InvalidRequestError: there is no template, it refuses the messages, or what it makes of them is too long.
        """
        if tokenizer is None:
            raise InvalidRequestError("messages: this model has no tokenizer; send input_ids")
        if not tokenizer.chat_template:
            raise InvalidRequestError("messages: this model has no chat template; send text_input")
        # The text is for this check alone: only when tokens are asked for does the library tell the template's special
        # tokens from those in messages.
        messages = _with_contents(self.messages, _as_parts if in_parts else _as_text)
        check_text("messages", self._apply(tokenizer, messages, tokenize=False), max_chars)
        tokenized = self._apply(tokenizer, messages, tokenize=True, sanitize_control_tokens=True)
        token_ids: list[int] = tokenized["input_ids"]
        return token_ids

    def _template_variables(self) -> dict[str, Any]:
        continues = self.template_kwargs.get("continue_final_message", False)
        return {"add_generation_prompt": not continues, **self.template_kwargs}

    def _apply(self, tokenizer: Any, messages: list[dict[str, Any]], **options: bool) -> Any:
        try:
            return tokenizer.apply_chat_template(messages, tools=self.tools, **self._template_variables(), **options)
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


def _with_contents(messages: list[dict[str, Any]], form: Callable[[Any], Any]) -> list[dict[str, Any]]:
    return [{**message, "content": form(message["content"])} for message in messages]


def _as_parts(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _as_text(content: Any) -> Any:
    return "\n".join(part["text"] for part in content) if isinstance(content, list) else content


def _check_messages(messages: Any, media: list[Medium], read_medium: ReadMedium) -> list[dict[str, Any]]:
    if not _is_list(messages) or len(messages) == 0:
        raise InvalidRequestError(f"messages is {shown(messages)}: must be a list of at least 1 message")
    return [_check_message(f"messages.{index}", each, media, read_medium) for index, each in enumerate(messages)]


def _check_message(name: str, message: Any, media: list[Medium], read_medium: ReadMedium) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequestError(f"{name} is {shown(message)}: must be an object")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidRequestError(f"{name}.role is {shown(role)}: must be a string such as 'user'")
    content = message.get("content")
    if _is_list(content):
        content = [
            _check_part(f"{name}.content.{index}", part, media, read_medium) for index, part in enumerate(content)
        ]
    elif content is not None and not isinstance(content, str):
        raise InvalidRequestError(f"{name}.content is {shown(content)}: must be a string, null or a list of parts")
    return {**message, "content": content}


def _check_part(name: str, part: Any, media: list[Medium], read_medium: ReadMedium) -> dict[str, Any]:
    """Of a medium its kind is left, and it is added to `media`."""
    if not isinstance(part, Mapping):
        raise InvalidRequestError(f"{name} is {shown(part)}: must be an object")
    part_type = part.get("type")
    if part_type == "text":
        text = part.get("text")
        if not isinstance(text, str):
            raise InvalidRequestError(f"{name}.text is {shown(text)}: must be a string")
        return {"type": "text", "text": text}
    kind = _KIND_OF_PART.get(part_type) if isinstance(part_type, str) else None
    if kind is None:
        known = ", ".join(["text", *_KIND_OF_PART])
        raise InvalidRequestError(f"{name}.type is {shown(part_type)}: must be one of {known}")
    assert isinstance(part_type, str)
    value = part.get(part_type)
    if isinstance(value, Mapping):
        value = value.get("url")
    media.append(read_medium(kind, f"{name}.{part_type}", value))
    return {"type": kind}


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
    reserved = _reserved_names() - TEMPLATE_SWITCHES
    for name, value in given.items():
        if not isinstance(name, str) or name in reserved:
            raise InvalidRequestError(f"chat_template_kwargs.{shown(name)[1:-1]}: cannot be set by a request")
        if name in TEMPLATE_SWITCHES and not isinstance(value, bool):
            raise InvalidRequestError(f"chat_template_kwargs.{name} is {shown(value)}: must be true or false")
    if all(given.get(name) for name in TEMPLATE_SWITCHES):
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

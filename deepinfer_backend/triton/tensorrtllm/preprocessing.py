"""`preprocessing` of the TensorRT-LLM backend's repository: texts → the token ids that `tensorrt_llm` takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from numpy.typing import NDArray

from deepinfer_backend.errors import ConfigError, InvalidRequestError, shown
from deepinfer_backend.triton.input_tensors import decode_text
from deepinfer_backend.triton.tensorrtllm.tokenizer_model import TokenizerModel, read_bool

_NO_MEDIA = "images and videos go to tensorrt_llm_bls, or to the model deepinfer"
# Input → what it would need.
_REFUSED = {
    "DECODER_QUERY": "models with an encoder are not supported",
    "IMAGE_BYTES": _NO_MEDIA,
    "IMAGE_URL": _NO_MEDIA,
    "IMAGES": _NO_MEDIA,
    "VIDEO_BYTES": _NO_MEDIA,
    "PROMPT_TABLE_EXTRA_ID": "prompt tables are not supported",
}
_MULTIMODAL = "multimodal_model_path"
_UNUSED_TOKEN_ID = 0  # fills a shorter list of words, whose offsets of -1 say that it ends


class TritonPythonModel(TokenizerModel):
    """A request may have several rows, one prompt each; a shorter one is padded at its end.

    What it does not know it leaves out: the end token where the tokenizer has none, and all that is about images. An
    optional input of the next model is then left out as well. A decoder's input is one padding token: there is none.
    """

    _add_special_tokens: bool

    def configure(self, parameters: Mapping[str, str]) -> None:
        if _MULTIMODAL in parameters:
            raise ConfigError(
                f"config.pbtxt: {_MULTIMODAL} is {shown(parameters[_MULTIMODAL])}: must be left out ({_NO_MEDIA})"
            )
        self._add_special_tokens = read_bool(parameters, "add_special_tokens", default=True)

    def build_tensors(self, tensors: Mapping[str, Any]) -> list[Any]:
        for name, reason in _REFUSED.items():
            if name in tensors:
                raise InvalidRequestError(f"{name} is set: must be left out ({reason})")
        loaded = self._tokenizer.get()
        tokenizer = loaded.tokenizer
        pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        prompts = [
            self._tokenize_prompt(tokenizer, text, loaded.max_chars)
            for text in _read_prompts("QUERY", tensors["QUERY"])
        ]
        num_rows = len(prompts)

        def encode(text: str) -> list[int]:
            token_ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
            return token_ids

        arrays: dict[str, NDArray[Any] | None] = {
            "INPUT_ID": _pad(prompts, pad_id or 0),
            "REQUEST_INPUT_LEN": np.array([[len(prompt)] for prompt in prompts], dtype=np.int32),
            "BAD_WORDS_IDS": word_lists("BAD_WORDS_DICT", tensors.get("BAD_WORDS_DICT"), num_rows, encode),
            "STOP_WORDS_IDS": word_lists("STOP_WORDS_DICT", tensors.get("STOP_WORDS_DICT"), num_rows, encode),
            "EMBEDDING_BIAS": embedding_bias(
                tensors.get("EMBEDDING_BIAS_WORDS"),
                tensors.get("EMBEDDING_BIAS_WEIGHTS"),
                num_rows,
                loaded.vocab_size,
                encode,
            ),
            "REQUEST_OUTPUT_LEN": np.array(tensors["REQUEST_OUTPUT_LEN"], dtype=np.int32),
            "DECODER_INPUT_ID": np.full((num_rows, 1), pad_id or 0, dtype=np.int32),
            "REQUEST_DECODER_INPUT_LEN": np.ones((num_rows, 1), dtype=np.int32),
            "OUT_END_ID": _given_or_default(tensors.get("END_ID"), tokenizer.eos_token_id, num_rows),
            "OUT_PAD_ID": _given_or_default(tensors.get("PAD_ID"), pad_id, num_rows),
        }
        return [pb_utils.Tensor(name, array) for name, array in arrays.items() if array is not None]

    def _tokenize_prompt(self, tokenizer: Any, text: str, max_chars: int | None) -> list[int]:
        if not text:
            raise InvalidRequestError("QUERY is empty: must have at least 1 character")
        if max_chars is not None and len(text) > max_chars:
            raise InvalidRequestError(f"QUERY has {len(text)} characters: must have at most {max_chars}")
        token_ids: list[int] = tokenizer.encode(text, add_special_tokens=self._add_special_tokens)
        return token_ids


def word_lists(
    name: str, words: NDArray[Any] | None, num_rows: int, encode: Callable[[str], list[int]]
) -> NDArray[np.int32]:
    """[num_rows, 2, width]: in each row the words' tokens, one word after the other, over the offset of each one's end.

    The offsets are filled up with -1. Empty words, with which clients fill up rows, count for nothing.

    Raises:
        InvalidRequestError: a word is not UTF-8.
    """
    if words is None:
        return np.empty((num_rows, 2, 0), dtype=np.int32)
    rows = [
        [token_ids for value in row if (token_ids := encode(decode_text(name, value)))]
        for row in words.reshape(num_rows, -1).tolist()
    ]
    flat_rows = [[token_id for token_ids in row for token_id in token_ids] for row in rows]
    lists = np.full((num_rows, 2, max(1, *map(len, flat_rows))), -1, dtype=np.int32)
    lists[:, 0] = _UNUSED_TOKEN_ID
    for row, flat, row_lists in zip(rows, flat_rows, lists, strict=True):
        row_lists[0, : len(flat)] = flat
        row_lists[1, : len(row)] = np.cumsum([len(token_ids) for token_ids in row])
    return lists


def embedding_bias(
    words: NDArray[Any] | None,
    weights: NDArray[Any] | None,
    num_rows: int,
    vocab_size: int,
    encode: Callable[[str], list[int]],
) -> NDArray[np.float32]:
    """[num_rows, vocab_size]: each word's weight on each of its tokens, added up; [num_rows, 0] without words.

    Raises:
        InvalidRequestError: there are not as many weights as words, a weight is nan or inf, or a word is not UTF-8.
    """
    if words is None and weights is None:
        return np.empty((num_rows, 0), dtype=np.float32)
    if words is None or weights is None or words.shape != weights.shape:
        shapes = ["left out" if array is None else str(list(array.shape)) for array in (words, weights)]
        raise InvalidRequestError(
            f"EMBEDDING_BIAS_WEIGHTS has shape {shapes[1]}: must be that of EMBEDDING_BIAS_WORDS, {shapes[0]}"
        )
    if np.isnan(weights).any() or np.isposinf(weights).any():
        raise InvalidRequestError("EMBEDDING_BIAS_WEIGHTS has nan or inf: must be numbers, or -inf for a word to avoid")
    biases = np.zeros((num_rows, vocab_size), dtype=np.float32)
    for row_words, row_weights, bias in zip(
        words.reshape(num_rows, -1).tolist(), weights.reshape(num_rows, -1), biases, strict=True
    ):
        for word, weight in zip(row_words, row_weights, strict=True):
            for token_id in encode(decode_text("EMBEDDING_BIAS_WORDS", word)):
                if token_id < vocab_size:  # the model has no logit of others
                    bias[token_id] += weight
    return biases


def _read_prompts(name: str, queries: NDArray[Any]) -> list[str]:
    if queries.ndim != 2 or queries.shape[1] != 1:
        raise InvalidRequestError(f"{name} has shape {list(queries.shape)}: must be [number of prompts, 1]")
    return [decode_text(name, value) for (value,) in queries.tolist()]


def _pad(rows: Sequence[Sequence[int]], pad_id: int) -> NDArray[np.int32]:
    padded = np.full((len(rows), max(map(len, rows))), pad_id, dtype=np.int32)
    for row, padded_row in zip(rows, padded, strict=True):
        padded_row[: len(row)] = row
    return padded


def _given_or_default(given: NDArray[Any] | None, default: int | None, num_rows: int) -> NDArray[np.int32] | None:
    if given is not None:
        return np.array(given, dtype=np.int32)
    return None if default is None else np.full((num_rows, 1), default, dtype=np.int32)

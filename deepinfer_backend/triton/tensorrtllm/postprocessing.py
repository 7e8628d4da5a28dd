"""`postprocessing` of the TensorRT-LLM backend's repository: token ids → text.

It keeps nothing from one request to the next, and so can take the pieces of a stream of `tensorrt_llm`, which end
where a character does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from numpy.typing import NDArray

from deepinfer_backend.errors import InvalidRequestError
from deepinfer_backend.triton.tensorrtllm.tokenizer_model import TokenizerModel, read_bool

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class TritonPythonModel(TokenizerModel):
    """Rows and sequences of a request become one list of texts, in this order."""

    _skip_special_tokens: bool

    def configure(self, parameters: Mapping[str, str]) -> None:
        self._skip_special_tokens = read_bool(parameters, "skip_special_tokens", default=True)

    def build_tensors(self, tensors: Mapping[str, Any]) -> list[Any]:
        sequences = read_sequences(tensors["TOKENS_BATCH"], tensors["SEQUENCE_LENGTH"])
        tokenizer = self._tokenizer.get().tokenizer
        texts = [decode_piece(tokenizer, token_ids, self._skip_special_tokens) for token_ids in sequences]
        return [pb_utils.Tensor("OUTPUT", np.array([text.encode("utf-8") for text in texts], dtype=np.object_))]


def decode_piece(tokenizer: Any, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
    """The text of tokens from the middle of a text: a space before the first of them stays.

    tokenizer: a transformers one. With its token for the beginning in front they are from there: such a space goes.
    An incomplete character at the end is left out.
    """
    backend = tokenizer.backend_tokenizer
    is_beginning = len(token_ids) > 0 and token_ids[0] == tokenizer.bos_token_id
    # Many decoders drop the space before the first word of a text; after this one nothing is first.
    before = [] if is_beginning else backend.encode("a", add_special_tokens=False).ids
    told = backend.decode(before, skip_special_tokens=skip_special_tokens)
    text = backend.decode([*before, *token_ids], skip_special_tokens=skip_special_tokens)
    return str(text).removeprefix(told).rstrip(_REPLACEMENT)


def read_sequences(tokens: NDArray[Any], lengths: NDArray[Any]) -> list[list[int]]:
    """The token ids of each sequence, without what fills it up.

    tokens: [num_rows, num_sequences, width]; lengths: [num_rows, num_sequences].

    Raises:
        InvalidRequestError: the shapes do not fit, or a length or a token id is out of range.
    """
    if tokens.ndim != 3 or lengths.shape != tokens.shape[:2]:
        raise InvalidRequestError(
            f"TOKENS_BATCH has shape {list(tokens.shape)}, SEQUENCE_LENGTH {list(lengths.shape)}: must be "
            "[rows, sequences, tokens] and [rows, sequences]"
        )
    sequences = []
    for row, length in zip((row for rows in tokens for row in rows), lengths.ravel().tolist(), strict=True):
        if not 0 <= length <= len(row):
            raise InvalidRequestError(
                f"SEQUENCE_LENGTH has {length}: must be 0 to {len(row)}, the width of TOKENS_BATCH"
            )
        sequence: list[int] = row[:length].tolist()
        if sequence and min(sequence) < 0:
            raise InvalidRequestError(f"TOKENS_BATCH has {min(sequence)}: must be at least 0")
        sequences.append(sequence)
    return sequences

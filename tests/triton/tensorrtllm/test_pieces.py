"""preprocessing and postprocessing of the TensorRT-LLM backend's repository, with a fake Triton."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deepinfer_backend.engine.engine_info_file import read_engine_info, write_engine_info
from deepinfer_backend.engine.messages import EngineInfo
from deepinfer_backend.errors import ConfigError, UnavailableError, UnsupportedModelError
from tests.support import fake_triton
from tests.support.fake_triton import InferenceResponse, Request, TritonError
from tests.support.tiny_text_model import byte_tokenizer
from tests.support.tokenizers import bundled_tokenizer, sentencepiece_like_tokenizer
from tests.support.triton_server import wait_until

from deepinfer_backend.triton import shutdown_signal  # isort: skip (after fake_triton)
from deepinfer_backend.triton.frontend_registry import FRONTENDS_FOLDER_VARIABLE, find_dead_frontends  # isort: skip
from deepinfer_backend.triton.tensorrtllm import postprocessing, preprocessing, tokenizer_model  # isort: skip
from deepinfer_backend.triton.tensorrtllm.shared_tokenizer import EngineTokenizer  # isort: skip
from deepinfer_backend.triton.tensorrtllm.tensors import PREPROCESSING  # isort: skip

assert fake_triton

LONG_TEXT = "  The sea is  blue,\nthe sky as well 🌊 海は青い. It's <|im_end|> x "
REFUSED = ["DECODER_QUERY", "IMAGE_BYTES", "IMAGE_URL", "IMAGES", "VIDEO_BYTES", "PROMPT_TABLE_EXTRA_ID"]

Load = Callable[..., Any]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    """load(module, tokenizer or None, model_json={}, **parameters): an initialized model of that module."""
    monkeypatch.setattr(tokenizer_model, "set_up_logging", lambda name: None)
    monkeypatch.setattr(shutdown_signal, "end_with_server", lambda: None)
    monkeypatch.setattr(tokenizer_model, "exit_quickly", lambda: None)
    models: list[Any] = []

    def load_model(module: Any, tokenizer: Any, model_json: Any = None, **parameters: str) -> Any:
        if tokenizer is not None:
            tokenizer.save_pretrained(tmp_path / "tokenizer")
            parameters = {"tokenizer_dir": str(tmp_path / "tokenizer"), **parameters}
        (tmp_path / "1").mkdir(exist_ok=True)
        if model_json is not None:
            (tmp_path / "1" / "model.json").write_text(json.dumps(model_json))
        config = {"parameters": {name: {"string_value": value} for name, value in parameters.items()}}
        model = module.TritonPythonModel()
        model.initialize(
            {
                "model_name": "piece",
                "model_config": json.dumps(config),
                "model_repository": str(tmp_path),
                "model_version": "1",
            }
        )
        models.append(model)
        return model

    yield load_model
    for model in models:
        model.finalize()


def texts(rows: list[list[str | bytes]]) -> Any:
    return np.array([[t.encode() if isinstance(t, str) else t for t in row] for row in rows], dtype=np.object_)


def query(*prompts: str | bytes, **tensors: Any) -> Request:
    output_lengths = np.full((len(prompts), 1), 8, dtype=np.int32)
    return Request(QUERY=texts([[each] for each in prompts]), REQUEST_OUTPUT_LEN=output_lengths, **tensors)


def tokens(*sequences: list[int], lengths: Any = None) -> Request:
    width = max(map(len, sequences))
    padded = [[*sequence, *[0] * (width - len(sequence))] for sequence in sequences]
    lengths = [[len(sequence) for sequence in sequences]] if lengths is None else lengths
    return Request(
        TOKENS_BATCH=np.array([padded], dtype=np.int32).reshape(1, len(sequences), width),
        SEQUENCE_LENGTH=np.array(lengths, dtype=np.int32),
    )


def outputs(response: InferenceResponse) -> dict[str, Any]:
    assert response.error is None, response.error and response.error.message
    return {tensor.name(): tensor.as_numpy() for tensor in response.tensors}


def only(model: Any, request: Request) -> dict[str, Any]:
    [response] = model.execute([request])
    return outputs(response)


def error_of(model: Any, request: Request) -> TritonError:
    [response] = model.execute([request])
    assert response.error is not None
    error: TritonError = response.error
    return error


def decoded(model: Any, request: Request) -> list[str]:
    return [text.decode() for text in only(model, request)["OUTPUT"].tolist()]


@pytest.mark.parametrize("make_tokenizer", [bundled_tokenizer, sentencepiece_like_tokenizer])
def test_a_prompt_is_tokenized_as_transformers_does(load: Load, make_tokenizer: Callable[[], Any]) -> None:
    tokenizer = make_tokenizer()
    model = load(preprocessing, tokenizer)
    tensors = only(model, query("the sea is a sea"))
    expected = tokenizer("the sea is a sea")["input_ids"]
    assert tensors["INPUT_ID"].tolist() == [expected]
    assert tensors["REQUEST_INPUT_LEN"].tolist() == [[len(expected)]]
    assert tensors["REQUEST_OUTPUT_LEN"].tolist() == [[8]]
    assert tensors["OUT_END_ID"].tolist() == [[tokenizer.eos_token_id]]
    pad_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    assert tensors["OUT_PAD_ID"].tolist() == [[pad_id]]
    assert tensors["STOP_WORDS_IDS"].shape == tensors["BAD_WORDS_IDS"].shape == (1, 2, 0)
    assert tensors["EMBEDDING_BIAS"].shape == (1, 0)


def test_add_special_tokens_false_leaves_them_out(load: Load) -> None:
    tokenizer = sentencepiece_like_tokenizer()
    model = load(preprocessing, tokenizer, add_special_tokens="False")
    assert only(model, query("the sea"))["INPUT_ID"].tolist() == [
        tokenizer("the sea", add_special_tokens=False)["input_ids"]
    ]


def test_rows_are_padded_to_the_longest(load: Load) -> None:
    tokenizer = sentencepiece_like_tokenizer()
    model = load(preprocessing, tokenizer)
    tensors = only(model, query("the", "the sea is a sea", "the sea"))
    rows = [tokenizer(text)["input_ids"] for text in ("the", "the sea is a sea", "the sea")]
    assert tensors["REQUEST_INPUT_LEN"].tolist() == [[len(row)] for row in rows]
    for padded, row in zip(tensors["INPUT_ID"].tolist(), rows, strict=True):
        assert padded == row + [tokenizer.eos_token_id] * (len(rows[1]) - len(row))
    assert tensors["OUT_END_ID"].shape == tensors["OUT_PAD_ID"].shape == (3, 1)
    assert tensors["STOP_WORDS_IDS"].shape == (3, 2, 0)


def test_end_and_pad_token_of_the_client_win(load: Load) -> None:
    model = load(preprocessing, bundled_tokenizer())
    tensors = only(model, query("a", END_ID=np.array([[5]], np.int32), PAD_ID=np.array([[6]], np.int32)))
    assert (tensors["OUT_END_ID"].tolist(), tensors["OUT_PAD_ID"].tolist()) == ([[5]], [[6]])


@pytest.mark.parametrize("name", ["STOP_WORDS", "BAD_WORDS"])
def test_words_become_their_tokens_over_the_offsets_of_their_ends(load: Load, name: str) -> None:
    tokenizer = bundled_tokenizer()
    model = load(preprocessing, tokenizer)
    rows: list[list[str | bytes]] = [["\n\n", "The end of it"], ["stop", ""]]
    tensors = only(model, query("a", "b", **{f"{name}_DICT": texts(rows)}))
    for (token_ids, ends), words in zip(tensors[f"{name}_IDS"].tolist(), rows, strict=True):
        encoded = [tokenizer(word, add_special_tokens=False)["input_ids"] for word in words if word]
        flat = [token_id for word in encoded for token_id in word]
        assert token_ids == flat + [0] * (len(token_ids) - len(flat))
        begin = 0
        for end, word in zip(ends, encoded, strict=False):
            assert token_ids[begin:end] == word
            begin = end
        assert ends[len(encoded) :] == [-1] * (len(ends) - len(encoded))


def test_biases_are_added_up_on_the_tokens_of_their_words(load: Load) -> None:
    tokenizer = bundled_tokenizer()
    model = load(preprocessing, tokenizer)
    words = texts([[" sea", " sky", " sea", " sea sky"]])
    weights = np.array([[1.5, -2.0, 1.0, 0.25]], dtype=np.float32)
    bias = only(model, query("a", EMBEDDING_BIAS_WORDS=words, EMBEDDING_BIAS_WEIGHTS=weights))["EMBEDDING_BIAS"]
    [sea], [sky] = (tokenizer(word, add_special_tokens=False)["input_ids"] for word in (" sea", " sky"))
    assert bias.shape == (1, len(tokenizer))
    assert {int(id_): float(bias[0, id_]) for id_ in np.flatnonzero(bias[0])} == {sea: 2.75, sky: -1.75}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"EMBEDDING_BIAS_WORDS": texts([["a", "b"]])}, "EMBEDDING_BIAS_WEIGHTS has shape left out"),
        (
            {
                "EMBEDDING_BIAS_WORDS": texts([["a", "b"]]),
                "EMBEDDING_BIAS_WEIGHTS": np.array([[1.0]], dtype=np.float32),
            },
            r"EMBEDDING_BIAS_WEIGHTS has shape \[1, 1\]: must be that of EMBEDDING_BIAS_WORDS, \[1, 2\]",
        ),
        (
            {
                "EMBEDDING_BIAS_WORDS": texts([["a"]]),
                "EMBEDDING_BIAS_WEIGHTS": np.array([[np.nan]], dtype=np.float32),
            },
            "EMBEDDING_BIAS_WEIGHTS has nan or inf",
        ),
        ({"STOP_WORDS_DICT": texts([[b"\xff"]])}, "STOP_WORDS_DICT is not valid UTF-8"),
        *(({name: np.zeros((1, 1))}, f"{name} is set: must be left out") for name in REFUSED),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(load: Load, tensors: dict[str, Any], message: str) -> None:
    error = error_of(load(preprocessing, sentencepiece_like_tokenizer()), query("a", **tensors))
    assert error.code == TritonError.INVALID_ARG
    assert re.match(f"INVALID_ARG: {message}", error.message)


def test_every_input_is_read_or_refused() -> None:
    read = {"QUERY", "REQUEST_OUTPUT_LEN", "BAD_WORDS_DICT", "STOP_WORDS_DICT", "END_ID", "PAD_ID"}
    read |= {"EMBEDDING_BIAS_WORDS", "EMBEDDING_BIAS_WEIGHTS"}
    assert {spec.name for spec in PREPROCESSING.inputs} == read | set(REFUSED)


@pytest.mark.parametrize(
    ("prompt", "message"), [("", "QUERY is empty"), (b"\xc3\x28", "QUERY is not valid UTF-8: byte")]
)
def test_one_bad_request_does_not_disturb_the_others(load: Load, prompt: str | bytes, message: str) -> None:
    model = load(preprocessing, bundled_tokenizer())
    first, bad, last = model.execute([query("The sea"), query(prompt), query("The sky")])
    assert message in bad.error.message
    for response, text in ((first, "The sea"), (last, "The sky")):
        assert outputs(response)["INPUT_ID"].tolist() == [bundled_tokenizer()(text)["input_ids"]]


@pytest.mark.parametrize("make_tokenizer", [bundled_tokenizer, byte_tokenizer])
@pytest.mark.parametrize("num_tokens", [1, 3])
def test_the_texts_of_pieces_joined_are_the_text_of_all(
    load: Load, make_tokenizer: Callable[[], Any], num_tokens: int
) -> None:
    tokenizer = make_tokenizer()
    model = load(postprocessing, tokenizer, skip_special_tokens="false")
    token_ids = tokenizer(LONG_TEXT, add_special_tokens=False)["input_ids"]
    whole = tokenizer.backend_tokenizer.decode(token_ids, skip_special_tokens=False)
    assert decoded(model, tokens(token_ids)) == [whole]
    joined = ""
    for piece in whole_characters(tokenizer, token_ids, num_tokens):
        [text] = decoded(model, tokens(piece))
        joined += text
    assert joined == whole == LONG_TEXT


def whole_characters(tokenizer: Any, token_ids: list[int], num_tokens: int) -> Iterator[list[int]]:
    """Pieces of at least so many tokens that end where a character does, as tensorrt_llm sends them."""
    piece: list[int] = []
    for token_id in token_ids:
        piece.append(token_id)
        if len(piece) >= num_tokens and not tokenizer.decode(piece).endswith("\N{REPLACEMENT CHARACTER}"):
            yield piece
            piece = []
    yield from [piece] if piece else []


def test_a_space_in_front_of_a_piece_stays(load: Load) -> None:
    """SentencePiece's decoders drop it from the beginning of a text."""
    tokenizer = sentencepiece_like_tokenizer()
    model = load(postprocessing, tokenizer)
    [sea] = tokenizer("sea", add_special_tokens=False)["input_ids"]
    assert tokenizer.decode([sea]) == "sea"
    assert decoded(model, tokens([sea])) == [" sea"]
    prompt = tokenizer("sea is")["input_ids"]
    assert prompt[0] == tokenizer.bos_token_id
    assert decoded(model, tokens(prompt)) == ["sea is"]  # a whole text, from its beginning


@pytest.mark.parametrize(("parameter", "expected"), [("true", ""), ("false", "</s>"), ("${skip_special_tokens}", "")])
def test_special_tokens_are_shown_only_if_configured(load: Load, parameter: str, expected: str) -> None:
    tokenizer = sentencepiece_like_tokenizer()
    model = load(postprocessing, tokenizer, skip_special_tokens=parameter)
    assert decoded(model, tokens([tokenizer.eos_token_id])) == [expected]


def test_only_as_many_tokens_count_as_the_sequence_is_long(load: Load) -> None:
    tokenizer = bundled_tokenizer()
    model = load(postprocessing, tokenizer)
    token_ids = tokenizer(" one two three four")["input_ids"]
    assert decoded(model, tokens([])) == [""]  # a response of a stream that brings no whole character
    assert decoded(model, tokens(token_ids, token_ids, token_ids, lengths=[[1, 4, 0]])) == [
        " one",
        " one two three four",
        "",
    ]


def test_rows_and_sequences_become_one_list(load: Load) -> None:
    tokenizer = bundled_tokenizer()
    model = load(postprocessing, tokenizer)
    ids = [tokenizer(word)["input_ids"][0] for word in (" one", " two", " three", " four")]
    request = Request(
        TOKENS_BATCH=np.array(ids, dtype=np.int32).reshape(2, 2, 1), SEQUENCE_LENGTH=np.ones((2, 2), dtype=np.int32)
    )
    assert only(model, request)["OUTPUT"].shape == (4,)  # as clients know it
    assert decoded(model, request) == [" one", " two", " three", " four"]


def test_half_a_character_at_the_end_is_left_out(load: Load) -> None:
    tokenizer = byte_tokenizer()
    model = load(postprocessing, tokenizer)
    assert decoded(model, tokens(tokenizer("a🌊", add_special_tokens=False)["input_ids"][:-1])) == ["a"]


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (tokens([1, 2], lengths=[[3]]), "SEQUENCE_LENGTH has 3: must be 0 to 2"),
        (tokens([1, 2], lengths=[[-1]]), "SEQUENCE_LENGTH has -1: must be 0 to 2"),
        (tokens([1, 2], lengths=[[1, 1]]), r"TOKENS_BATCH has shape [1, 1, 2], SEQUENCE_LENGTH [1, 2]"),
        (tokens([1, -2]), "TOKENS_BATCH has -2: must be at least 0"),
    ],
)
def test_lengths_and_tokens_out_of_range_are_refused(load: Load, request_: Request, message: str) -> None:
    error = error_of(load(postprocessing, bundled_tokenizer()), request_)
    assert error.code == TritonError.INVALID_ARG
    assert message in error.message


@pytest.mark.parametrize(
    ("module", "parameters", "message"),
    [
        (preprocessing, {"add_special_tokens": "maybe"}, "add_special_tokens is 'maybe': must be true or false"),
        (postprocessing, {"skip_special_tokens": "2"}, "skip_special_tokens is '2': must be true or false"),
        (preprocessing, {"multimodal_model_path": "/llava"}, "multimodal_model_path is '/llava': must be left out"),
        (preprocessing, {}, "engine_of in model.json is None"),
        (postprocessing, {"tokenizer_dir": "${tokenizer_dir}"}, "engine_of in model.json is None"),
    ],
)
def test_a_wrong_configuration_does_not_load(load: Load, module: Any, parameters: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("$", r"\$")):
        load(module, None, **parameters)


def test_the_launcher_can_tell_when_its_process_dies(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton 2.51 starts no such process again: each request would be refused until the server is restarted."""
    folder = tmp_path / "frontends"
    folder.mkdir()
    monkeypatch.setenv(FRONTENDS_FOLDER_VARIABLE, str(folder))
    model = load(preprocessing, byte_tokenizer())
    assert [path.read_text() for path in folder.iterdir()] == ["piece"]
    assert find_dead_frontends(folder) == []
    model.finalize()
    assert list(folder.iterdir()) == []


def engine_info(tokenizer: Any, folder: Path, **config: Any) -> EngineInfo:
    tokenizer.save_pretrained(folder)
    return EngineInfo(
        str(folder),
        max_model_len=4,
        vocab_size=300,
        num_blocks=1,
        block_size=16,
        device="cpu",
        dtype="float32",
        tokenizer_path=str(folder),
        config={"skip_tokenizer_init": False, **config},
    )


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[EngineTokenizer]:
    (tmp_path / "engine").mkdir(mode=0o700)
    source = EngineTokenizer(tmp_path / "engine", "owner")
    yield source
    source.close()


def test_the_engines_tokenizer_is_there_once_the_engine_is(shared: EngineTokenizer, tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="the engine of owner is not ready"):
        shared.get()
    write_engine_info(tmp_path / "engine", engine_info(byte_tokenizer(), tmp_path / "bytes"))
    loaded = shared.get()
    assert loaded.tokenizer("é")["input_ids"] == byte_tokenizer()("é")["input_ids"]
    assert (loaded.vocab_size, loaded.max_chars) == (300, 256)


def test_another_engines_tokenizer_takes_its_place(shared: EngineTokenizer, tmp_path: Path) -> None:
    write_engine_info(tmp_path / "engine", engine_info(byte_tokenizer(), tmp_path / "bytes"))
    before = shared.get()
    (tmp_path / "engine" / "info").unlink()  # it is being restarted
    assert shared.get() is before
    other = sentencepiece_like_tokenizer()
    write_engine_info(tmp_path / "engine", engine_info(other, tmp_path / "words"))
    assert shared.get().tokenizer("the sea")["input_ids"] == other("the sea")["input_ids"]


def test_it_is_loaded_before_the_first_request(
    shared: EngineTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deepinfer_backend.triton.tensorrtllm import shared_tokenizer

    loaded: list[Path] = []

    def load_tokenizer(path: Path) -> Any:
        loaded.append(path)
        return byte_tokenizer()

    monkeypatch.setattr(shared_tokenizer, "load_tokenizer", load_tokenizer)
    info = engine_info(byte_tokenizer(), tmp_path / "bytes")
    write_engine_info(tmp_path / "engine", info)
    wait_until(lambda: bool(loaded), 10, "the tokenizer is loaded")
    shared.get()
    assert loaded == [Path(info.tokenizer_path)]


def test_a_model_without_a_tokenizer_is_told(shared: EngineTokenizer, tmp_path: Path) -> None:
    info = engine_info(byte_tokenizer(), tmp_path / "bytes", skip_tokenizer_init=True)
    write_engine_info(tmp_path / "engine", info)
    with pytest.raises(UnsupportedModelError, match="model owner has no tokenizer: set tokenizer_dir"):
        shared.get()


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deepinfer_backend.triton.tensorrtllm import shared_tokenizer

    (tmp_path / "engine").mkdir(mode=0o700)
    monkeypatch.setattr(shared_tokenizer, "engine_folder", lambda name, rank: tmp_path / "engine")
    model = load(preprocessing, None, {"engine_of": "owner"})
    assert error_of(model, query("a")).code == TritonError.UNAVAILABLE
    write_engine_info(tmp_path / "engine", engine_info(byte_tokenizer(), tmp_path / "bytes"))
    assert only(model, query("a" * 256))["REQUEST_INPUT_LEN"].tolist() == [[256]]
    assert "QUERY has 257 characters: must have at most 256" in error_of(model, query("a" * 257)).message


def test_what_is_known_of_an_engine_is_read_whole_or_not_at_all(tmp_path: Path) -> None:
    assert read_engine_info(tmp_path) is None
    assert read_engine_info(tmp_path / "missing") is None
    info = engine_info(byte_tokenizer(), tmp_path / "bytes")
    write_engine_info(tmp_path, info)
    assert read_engine_info(tmp_path) == info
    write_engine_info(tmp_path, info)  # again, in its place
    assert read_engine_info(tmp_path) == info

"""Grammars: what is compiled, what is refused and why, and that every finished text obeys."""

from __future__ import annotations

import json
import os
import random
import re
import select
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from deepinfer_backend.config import EngineConfig
from deepinfer_backend.engine.grammar_spec import check_spec
from deepinfer_backend.engine.grammars import Grammar, GrammarQueue, Result
from deepinfer_backend.errors import DeepInferError, EngineError, InvalidRequestError
from deepinfer_backend.models.loader import load_tokenizer, resolve_model
from deepinfer_backend.sampling_params import StructuredOutputs
from tests.support.grammar_cases import grammar_cases, json_schema_cases, regex_cases

# More than SmolLM2 has tokens: a model may pad its logits.
VOCAB_SIZE = 49_152 + 40
END_TOKEN_IDS = [2, 0]
NUM_WORDS = -(-VOCAB_SIZE // 32)
MAX_WALK_TOKENS = 60


def _spec(**fields: Any) -> StructuredOutputs:
    return StructuredOutputs(**fields)


TOO_SLOW = _spec(regex="(a|b|ab){1,200}" * 50)


@pytest.fixture(scope="module")
def folder() -> Path:
    return resolve_model(None)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def queue(folder: Path) -> Iterator[GrammarQueue]:
    queue = GrammarQueue(folder, VOCAB_SIZE, END_TOKEN_IDS, EngineConfig(grammar_compile_timeout_s=1.0))
    yield queue
    queue.close()


def _results(queue: GrammarQueue, num_results: int) -> list[tuple[str, Result]]:
    results: list[tuple[str, Result]] = []
    while len(results) < num_results:
        readable, _, _ = select.select([queue], [], [], 120.0)
        assert readable, "nothing came out of the queue"
        results += queue.poll()
    assert len(results) == num_results
    return results


def _compile(queue: GrammarQueue, spec: StructuredOutputs) -> Result:
    queue.submit("request", spec)
    [(request_id, result)] = _results(queue, 1)
    assert request_id == "request"
    return result


def _grammar(queue: GrammarQueue, spec: StructuredOutputs) -> Grammar:
    check_spec(spec, EngineConfig())
    result = _compile(queue, spec)
    assert not isinstance(result, DeepInferError), result
    return Grammar(result)


def _allowed(grammar: Grammar) -> list[int]:
    row = np.zeros(NUM_WORDS, np.int32)
    grammar.fill_bitmask(row)
    bits = np.unpackbits(row.view(np.uint8), count=VOCAB_SIZE, bitorder="little")
    return [int(token_id) for token_id in np.flatnonzero(bits)]


def _token(tokenizer: Any, text: str) -> int:
    [token_id] = tokenizer.encode(text, add_special_tokens=False)
    return int(token_id)


def _children(pid: int) -> set[int]:
    files = Path(f"/proc/{pid}/task").glob("*/children")
    return {int(child) for file in files for child in file.read_text().split()}


def _walk(grammar: Grammar, tokenizer: Any, draw: random.Random) -> str | None:
    """The text of random allowed tokens, up to an end token; None when there is none in time."""
    token_ids: list[int] = []
    row = np.zeros(NUM_WORDS, np.int32)
    for _ in range(MAX_WALK_TOKENS):
        grammar.fill_bitmask(row)
        bits = np.unpackbits(row.view(np.uint8), count=VOCAB_SIZE, bitorder="little")
        end_token_id = draw.choice(END_TOKEN_IDS)
        if bits[end_token_id] and draw.random() < 0.3:
            token_id = end_token_id
        else:
            allowed = np.flatnonzero(bits)
            token_id = int(allowed[draw.randrange(len(allowed))])
        assert grammar.accept(token_id)
        if grammar.is_terminated:
            return str(tokenizer.decode(token_ids, skip_special_tokens=True))
        token_ids.append(token_id)
    return None


def _walks(queue: GrammarQueue, tokenizer: Any, specs: list[StructuredOutputs]) -> Iterator[tuple[int, str]]:
    """Index of the spec, and the text of each finished walk over it; most walks must finish."""
    draw = random.Random(8)
    num_unfinished = 0
    for index, spec in enumerate(specs):
        check_spec(spec, EngineConfig())
        queue.submit(str(index), spec)
    for name, result in _results(queue, len(specs)):
        assert not isinstance(result, DeepInferError), (name, result)
        for _ in range(2):
            text = _walk(Grammar(result), tokenizer, draw)
            if text is None:
                num_unfinished += 1
            else:
                yield int(name), text
    assert num_unfinished < len(specs) / 5


def test_tokens_taken_back_leave_no_trace_even_past_the_end(queue: GrammarQueue, tokenizer: Any) -> None:
    grammar = _grammar(queue, _spec(regex="[ab]{2}"))
    first = _allowed(grammar)
    a = _token(tokenizer, "a")
    assert grammar.accept(a)
    second = _allowed(grammar)
    for tokens in ([a], [a, END_TOKEN_IDS[0]]):
        for token_id in tokens:
            assert grammar.accept(token_id)
        grammar.take_back(len(tokens))
        assert _allowed(grammar) == second
    assert not grammar.is_terminated
    grammar.take_back(1)
    assert _allowed(grammar) == first


def test_every_finished_text_of_a_json_schema_validates(queue: GrammarQueue, tokenizer: Any) -> None:
    schemas = json_schema_cases()
    for index, text in _walks(queue, tokenizer, [_spec(json=schema) for schema in schemas]):
        jsonschema.Draft202012Validator(schemas[index]).validate(json.loads(text))


def test_every_finished_text_of_a_regex_matches_as_a_whole(queue: GrammarQueue, tokenizer: Any) -> None:
    patterns = regex_cases()
    for index, text in _walks(queue, tokenizer, [_spec(regex=pattern) for pattern in patterns]):
        assert re.fullmatch(patterns[index], text), patterns[index]


def test_every_finished_text_of_an_ebnf_grammar_belongs_to_it(queue: GrammarQueue, tokenizer: Any) -> None:
    cases = grammar_cases()
    for index, text in _walks(queue, tokenizer, [_spec(grammar=case.grammar) for case in cases]):
        assert cases[index].is_valid(text), (cases[index].grammar, text)


def test_a_choice_is_one_of_its_texts_whatever_their_characters(queue: GrammarQueue, tokenizer: Any) -> None:
    choices = ['"', "\\", "a\nb", "]^-[", "é", "日本", "😀", " ", "# no comment", "<|im_end|>", "root", "a" * 50]
    texts = [text for _, text in _walks(queue, tokenizer, [_spec(choice=choices)] * 30)]
    assert set(texts) <= set(choices)
    assert len(set(texts)) > len(choices) / 2


def test_json_object_is_any_object(queue: GrammarQueue, tokenizer: Any) -> None:
    grammar = _grammar(queue, _spec(json_object=True))
    for token_id in tokenizer.encode('{"a": [1, {"ß": null}], "b": "x"}', add_special_tokens=False):
        assert grammar.accept(token_id)
    assert set(END_TOKEN_IDS) <= set(_allowed(grammar))
    assert grammar.accept(END_TOKEN_IDS[0])
    assert not _grammar(queue, _spec(json_object=True)).accept(_token(tokenizer, "["))


def test_each_end_token_ends_a_complete_text_and_no_other_token_may_follow(queue: GrammarQueue, tokenizer: Any) -> None:
    for end_token_id in END_TOKEN_IDS:
        grammar = _grammar(queue, _spec(regex="ab?"))
        assert not grammar.accept(end_token_id)
        assert grammar.accept(_token(tokenizer, "a"))
        assert sorted(_allowed(grammar)) == sorted([*END_TOKEN_IDS, _token(tokenizer, "b")])
        assert grammar.accept(end_token_id)
        assert grammar.is_terminated
        assert not grammar.accept(_token(tokenizer, "b"))
        assert sorted(_allowed(grammar)) == sorted(END_TOKEN_IDS)


def test_a_refused_token_changes_nothing(queue: GrammarQueue, tokenizer: Any) -> None:
    grammar = _grammar(queue, _spec(regex="ab?"))
    before = _allowed(grammar)
    for token_id in (_token(tokenizer, "b"), VOCAB_SIZE - 1, VOCAB_SIZE, -1):
        assert not grammar.accept(token_id)
    assert _allowed(grammar) == before


def test_special_tokens_are_no_text(queue: GrammarQueue, tokenizer: Any) -> None:
    allowed = _allowed(_grammar(queue, _spec(regex=r"[\s\S]{1,20}")))
    assert not set(allowed) & {*tokenizer.all_special_ids, *range(len(tokenizer), VOCAB_SIZE)}


def test_forks_go_their_own_ways(queue: GrammarQueue, tokenizer: Any) -> None:
    a, b, c = (_token(tokenizer, text) for text in "abc")
    grammar = _grammar(queue, _spec(regex="a(bc|cb)"))
    assert grammar.accept(a)
    fork = grammar.fork()
    assert fork.accept(b)
    assert grammar.accept(c)
    assert (c in _allowed(fork), b in _allowed(grammar)) == (True, True)
    assert not fork.accept(b)
    assert fork.accept(c)
    assert fork.accept(END_TOKEN_IDS[0])
    assert (fork.is_terminated, grammar.is_terminated, fork.fork().is_terminated) == (True, False, True)


def test_a_dead_end_is_an_error_and_not_an_empty_row(queue: GrammarQueue, tokenizer: Any) -> None:
    grammar = _grammar(queue, _spec(grammar='root ::= "a" more\nmore ::= more "b"'))
    assert grammar.accept(_token(tokenizer, "a"))
    with pytest.raises(InvalidRequestError, match="structured_outputs cannot be completed"):
        _allowed(grammar)


def test_a_grammar_with_too_many_readings_is_an_error_before_it_holds_up_the_others(
    queue: GrammarQueue, tokenizer: Any
) -> None:
    grammar = _grammar(queue, _spec(grammar='root ::= s\ns ::= s s s | s s | "a" | ""'))
    row = np.zeros(NUM_WORDS, np.int32)
    with pytest.raises(InvalidRequestError, match="structured_outputs is too ambiguous: one token took"):
        for _ in range(400):
            assert grammar.accept(_token(tokenizer, "a"))
            grammar.fill_bitmask(row)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            {"grammar": 'root ::= "a" | missing'},
            'structured_outputs.grammar cannot be used: .*"missing" is not defined',
        ),
        ({"grammar": "start ::= 'a'"}, "structured_outputs.grammar cannot be used"),
        ({"grammar": "root ::= root"}, "structured_outputs.grammar allows no text"),
        ({"grammar": "root ::= " + "(" * 20_000}, "structured_outputs.grammar cannot be"),
        (
            {"json": {"oneOf": [{"type": "integer"}, {"type": "number"}]}},
            "structured_outputs.json cannot be used: oneOf",
        ),
    ],
)
def test_a_grammar_that_cannot_be_compiled_fails_with_the_reason(
    queue: GrammarQueue, spec: dict[str, Any], message: str
) -> None:
    result = _compile(queue, _spec(**spec))
    assert isinstance(result, InvalidRequestError)
    assert re.search(message, result.message), result.message


def test_a_slow_grammar_fails_alone_and_the_next_goes_on(queue: GrammarQueue) -> None:
    queue.submit("slow", TOO_SLOW)
    queue.submit("next", _spec(choice=["after", "the", "slow", "one"]))
    assert queue.num_pending == 2
    (slow, reason), (next_one, compiled) = _results(queue, 2)
    assert (slow, next_one, queue.num_pending) == ("slow", "next", 0)
    assert isinstance(reason, InvalidRequestError)
    assert "structured_outputs.regex takes longer than 1 s to compile" in reason.message
    assert not isinstance(compiled, DeepInferError)


def test_a_cached_grammar_is_ready_at_the_next_poll(queue: GrammarQueue) -> None:
    first = _compile(queue, _spec(choice=["cached"]))
    queue.submit("slow", TOO_SLOW)
    queue.submit("again", _spec(choice=["cached"]))
    [(request_id, again)] = queue.poll()
    assert (request_id, again) == ("again", first)
    queue.cancel("slow")


def test_the_same_spec_is_compiled_once_for_all_that_wait(queue: GrammarQueue) -> None:
    spec = _spec(choice=["compiled", "once"])
    queue.submit("a", spec)
    queue.submit("b", _spec(choice=["compiled", "apart"]))
    queue.submit("c", spec)
    results = dict(_results(queue, 3))
    assert results["a"] is results["c"]
    assert results["a"] is not results["b"]


def test_a_cancelled_request_never_comes_out(queue: GrammarQueue) -> None:
    queue.submit("compiling", _spec(choice=["first"]))
    queue.submit("waiting", _spec(choice=["second"]))
    queue.submit("stays", _spec(choice=["third"]))
    queue.cancel("compiling")
    queue.cancel("waiting")
    assert queue.num_pending == 1
    assert [request_id for request_id, _ in _results(queue, 1)] == ["stays"]
    queue.submit("ready", _spec(choice=["third"]))
    queue.cancel("ready")
    assert (queue.poll(), queue.num_pending) == ([], 0)


def test_the_death_of_the_compiler_fails_one_request_and_the_next_goes_on(folder: Path) -> None:
    before = _children(os.getpid())
    queue = GrammarQueue(folder, VOCAB_SIZE, END_TOKEN_IDS, EngineConfig(grammar_compile_timeout_s=60.0))
    try:
        assert not isinstance(_compile(queue, _spec(choice=["alive"])), DeepInferError)
        [compiler] = _children(os.getpid()) - before
        queue.submit("dies", TOO_SLOW)
        while not _children(compiler):
            time.sleep(0.01)
        queue.submit("next", _spec(choice=["alive", "again"]))
        os.kill(compiler, signal.SIGKILL)
        (_, died), (_, compiled) = _results(queue, 2)
        assert isinstance(died, EngineError)
        assert "structured_outputs.regex was not compiled: the grammar compiler ended with signal 9" in died.message
        assert not isinstance(compiled, DeepInferError)
    finally:
        queue.close()
    assert _children(os.getpid()) == before

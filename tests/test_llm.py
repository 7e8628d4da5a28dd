"""The offline class, through its public door."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from transformers import AutoTokenizer

from deepinfer_backend import LLM, RequestOutput, SamplingParams
from deepinfer_backend.errors import ConfigError, InvalidRequestError

GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(dtype="float32", max_model_len=512, max_num_seqs=8) as llm:
        yield llm


@pytest.fixture(scope="module")
def tokenizer(llm: LLM) -> Any:
    return AutoTokenizer.from_pretrained(llm.model_path)


def generate(llm: LLM, prompts: Any = None, sampling_params: Any = None, **kwargs: Any) -> list[Any]:
    return list(llm.generate(prompts, sampling_params, use_tqdm=False, **kwargs))


def test_one_result_per_prompt_in_prompt_order(llm: LLM) -> None:
    prompts = [f"Count up from {number}:" for number in range(11)]
    together = generate(llm, prompts, GREEDY)
    assert together == [generate(llm, [prompt], GREEDY)[0] for prompt in prompts]
    assert len(set(together)) > 1


def test_same_prompt_twice_gives_two_results(llm: LLM) -> None:
    first, second = generate(llm, ["Twice:", "Twice:"], GREEDY)
    assert first == second


def test_token_ids_and_text_are_the_same_prompt(llm: LLM, tokenizer: Any) -> None:
    prompt = "The largest ocean is"
    assert generate(llm, prompt_token_ids=[tokenizer(prompt)["input_ids"]], sampling_params=GREEDY) == generate(
        llm, prompt, GREEDY
    )


def test_params_may_differ_per_prompt_and_stay_as_they_were(llm: LLM, tokenizer: Any) -> None:
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (1, 5, 9)]
    copies = [param.model_copy(deep=True) for param in params]
    llm.decode_sequence = False
    try:
        results = generate(llm, ["a b c"] * 3, params)
    finally:
        llm.decode_sequence = True
    assert [len(result) for result in results] == [1, 5, 9]
    assert params == copies


def test_without_decoding_a_prompt_gives_its_request_outputs(llm: LLM, tokenizer: Any) -> None:
    text = generate(llm, "The largest ocean is", GREEDY)[0]
    llm.decode_sequence = False
    try:
        (outputs,) = generate(llm, "The largest ocean is", GREEDY)
    finally:
        llm.decode_sequence = True
    assert all(isinstance(output, RequestOutput) for output in outputs)
    assert [output.output_index for output in outputs] == list(range(len(outputs)))
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert tokenizer.decode([output.token_id for output in outputs], skip_special_tokens=True) == text


def test_stop_string_cuts_the_text_and_ends_the_request(llm: LLM) -> None:
    text = generate(llm, "The largest ocean is", GREEDY)[0]
    stop = text[3:8]
    params = GREEDY.model_copy(update={"stop": [stop]})
    assert generate(llm, "The largest ocean is", params)[0] == text[: text.index(stop)]
    assert llm.llm_engine.get_num_unfinished_requests() == 0


def test_stream_joined_is_the_text(llm: LLM) -> None:
    pieces = list(llm.generate_stream("The largest ocean is", GREEDY))
    assert len(pieces) > 1
    assert "".join(pieces) == generate(llm, "The largest ocean is", GREEDY)[0]


def test_stream_left_early_leaves_nothing_behind(llm: LLM) -> None:
    stream = llm.generate_stream("The largest ocean is", GREEDY)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    scheduler = llm.llm_engine.scheduler
    assert not llm.llm_engine.has_unfinished_requests()
    assert scheduler.num_free_blocks == scheduler.num_blocks


def test_chat_applies_the_models_template(llm: LLM, tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "Say hello."}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    expected = generate(llm, prompt_token_ids=[tokenizer(prompt)["input_ids"]], sampling_params=GREEDY)
    assert llm.chat(messages, GREEDY, use_tqdm=False) == expected
    assert llm.chat([messages, messages], GREEDY, use_tqdm=False) == expected * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompts": ["ok", ""]}, "prompt 1: text_input is empty"),
        ({"prompt_token_ids": [[5], [5, -1]]}, "prompt 1: input_ids has -1: must be 0 to 49151"),
        ({"prompt_token_ids": [[5], [49152]]}, "prompt 1: input_ids has 49152: must be 0 to 49151"),
        ({"prompt_token_ids": [[]]}, "prompt 0: the prompt has 0 tokens"),
        ({"prompt_token_ids": [[5] * 512]}, "prompt 0: the prompt has 512 tokens: must have at most 511"),
        ({}, "exactly one of prompts and prompt_token_ids"),
        ({"prompts": ["a"], "prompt_token_ids": [[5]]}, "exactly one of prompts and prompt_token_ids"),
        ({"prompts": ["a"], "sampling_params": [GREEDY, GREEDY]}, "sampling_params has 2 entries: must be one, or 1"),
        ({"prompts": ["a"], "multi_modal_data": {"image": 1}}, "multi_modal_data: not supported"),
    ],
)
def test_bad_prompt_raises_before_any_work_and_names_its_index(
    llm: LLM, arguments: dict[str, Any], message: str
) -> None:
    num_steps = llm.llm_engine.stats().num_steps
    with pytest.raises(InvalidRequestError) as error:
        generate(llm, **arguments)
    assert message in str(error.value)
    assert llm.llm_engine.stats().num_steps == num_steps
    assert llm.llm_engine.get_num_unfinished_requests() == 0


def test_unknown_engine_argument_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"max_num_seq.*did you mean 'max_num_seqs'"):
        LLM(max_num_seq=4)


def test_positions_that_the_model_does_not_have_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"max_model_len is 9000.*8192"):
        LLM(max_model_len=9000)

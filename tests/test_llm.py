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


def test_several_sequences_are_a_list_per_prompt_each_with_its_own_seed(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=5, max_tokens=8, ignore_eos=True)
    texts = generate(llm, ["The sea is", "The sky is"], params)
    assert [len(each) for each in texts] == [3, 3]
    assert len(set(texts[0])) == 3
    for index in range(3):
        alone = params.model_copy(update={"n": 1, "seed": 5 + index})
        assert generate(llm, "The sea is", alone) == [texts[0][index]]


def test_a_completion_tells_everything_about_every_sequence(llm: LLM, tokenizer: Any) -> None:
    params = SamplingParams(n=2, seed=1, max_tokens=6, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    (completion,) = llm.complete("The largest ocean is", params, use_tqdm=False)
    assert completion.prompt_token_ids == tokenizer("The largest ocean is")["input_ids"]
    assert completion.prompt_logprobs is not None
    assert completion.prompt_logprobs[0] is None
    told = [position[0].token_id for position in completion.prompt_logprobs if position]
    assert told == completion.prompt_token_ids[1:]
    assert [sequence.index for sequence in completion.sequences] == [0, 1]
    for sequence in completion.sequences:
        assert tokenizer.decode(sequence.token_ids) == sequence.text
        assert sequence.logprobs is not None
        assert [position[0].token_id for position in sequence.logprobs] == sequence.token_ids
        assert "".join(position[0].decoded_token for position in sequence.logprobs) == sequence.text
        assert [len(position) for position in sequence.logprobs] == [3] * 6
        assert sequence.cumulative_logprob == pytest.approx(sum(each[0].logprob for each in sequence.logprobs))
        assert (sequence.finish_reason, sequence.stop_reason) == ("length", None)
        times = sequence.times
        assert times.arrival_time_ns <= times.first_scheduled_time_ns <= times.first_token_time_ns
        assert times.first_token_time_ns < times.last_token_time_ns


def test_a_stop_string_of_one_sequence_leaves_the_others_running(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=5, max_tokens=12, ignore_eos=True)
    (whole,) = llm.complete("The sea is", params, use_tqdm=False)
    stop = whole.sequences[0].text[6:10]
    cut = [each.text.partition(stop)[0] for each in whole.sequences]
    assert cut[0] != whole.sequences[0].text and cut[1:] == [each.text for each in whole.sequences[1:]]
    (stopped,) = llm.complete("The sea is", params.model_copy(update={"stop": [stop]}), use_tqdm=False)
    assert [each.text for each in stopped.sequences] == cut
    assert [each.stop_reason for each in stopped.sequences] == [stop, None, None]
    assert llm.llm_engine.scheduler.num_free_blocks == llm.llm_engine.scheduler.num_blocks


def test_what_was_not_asked_for_is_none(llm: LLM) -> None:
    (completion,) = llm.complete("The sea is", GREEDY, use_tqdm=False)
    assert completion.prompt_logprobs is None
    assert (completion.sequences[0].logprobs, completion.sequences[0].cumulative_logprob) == (None, None)


def test_embeddings_have_length_1_and_do_not_depend_on_their_neighbours(llm: LLM, tokenizer: Any) -> None:
    prompts = ["The sea is blue.", "El mar es azul.", "x"]
    together = llm.embed(prompts, use_tqdm=False)
    assert [len(each) for each in together] == [llm.llm_engine.info.hidden_size] * 3
    assert [sum(number**2 for number in each) for each in together] == pytest.approx([1.0] * 3)
    (alone,) = llm.embed([tokenizer(prompts[1])["input_ids"]], use_tqdm=False)
    assert alone == pytest.approx(together[1], abs=1e-5)


def test_a_stream_has_one_text_only(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="n is 2: must be 1 for a stream of one text"):
        next(llm.generate_stream("x", SamplingParams(n=2)))
    with pytest.raises(InvalidRequestError, match="beam_width is 2: must be 1 when stream is true"):
        next(llm.generate_stream("x", SamplingParams(beam_width=2)))


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


def test_a_bad_chat_names_its_conversation(llm: LLM) -> None:
    good: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
    with pytest.raises(InvalidRequestError, match=r"prompt 1: messages\.0\.content is 5: must be a string"):
        llm.chat([good, [{"role": "user", "content": 5}]], GREEDY, use_tqdm=False)
    with pytest.raises(InvalidRequestError, match=r"prompt 0: chat_template_kwargs\.tokenize: cannot be set"):
        llm.chat(good, GREEDY, use_tqdm=False, chat_template_kwargs={"tokenize": False})


def test_without_a_tokenizer_token_ids_go_in_and_come_out(llm: LLM, tokenizer: Any) -> None:
    prompt = tokenizer("The largest ocean is")["input_ids"]
    params = GREEDY.model_copy(update={"detokenize": False})
    (expected,) = llm.complete(prompt_token_ids=[prompt], sampling_params=GREEDY, use_tqdm=False)
    with LLM(dtype="float32", max_model_len=512, kv_cache_memory_bytes=50_000_000, skip_tokenizer_init=True) as bare:
        assert bare.tokenizer is None
        (completion,) = bare.complete(prompt_token_ids=[prompt], sampling_params=params, use_tqdm=False)
        assert completion.sequences[0].token_ids == expected.sequences[0].token_ids
        assert completion.sequences[0].text == ""
        with pytest.raises(InvalidRequestError, match="this model has no tokenizer; send input_ids"):
            bare.generate("The largest ocean is", GREEDY, use_tqdm=False)


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
        ({"prompts": ["a"], "multi_modal_data": {"image": 1}}, "prompt 0: image.0 is a int: must be bytes, a path"),
        ({"prompts": ["a"], "multi_modal_data": [{}, {}]}, "multi_modal_data has 2 entries: must have 1, one a prompt"),
        ({"prompt_token_ids": [[1]], "multi_modal_data": {}}, "multi_modal_data is set: must be left out"),
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

"""With images and videos tokens are those of transformers' own processor and `generate`, however they come to be."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoModelForImageTextToText

from deepinfer_backend import LLM, SamplingParams
from deepinfer_backend.engine.messages import EngineRequest
from deepinfer_backend.errors import ConfigError, DeepInferError, EngineError, InvalidRequestError
from deepinfer_backend.media.medium import from_object
from deepinfer_backend.media.prompt import MediaPrompt
from deepinfer_backend.models.vision_families import VISION_FAMILIES as KNOWN_FAMILIES
from deepinfer_backend.models.vision_families import Kind
from deepinfer_backend.models.vision_model import VisionLanguageModel
from tests.support.engine_driver import EngineDriver
from tests.support.lora import make_random_adapter, merged_model
from tests.support.media import encoded, frames, picture, video_file
from tests.support.vision_models import VISION_FAMILIES, MediaCase, VisionOracle, make_vision_model, media_cases

# It warns of what its defaults will be some day.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

NUM_TOKENS = 40
BLOCK_SIZE = 16
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "block_size": BLOCK_SIZE,
    "num_gpu_blocks_override": 4000,
}
FamilyModel = tuple[Path, VisionOracle, list[MediaCase]]


@pytest.fixture(scope="module")
def family_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], FamilyModel]:
    @cache
    def make(name: str) -> FamilyModel:
        path = make_vision_model(name, tmp_path_factory.mktemp("vision"))
        oracle = VisionOracle(path)
        return path, oracle, media_cases(VISION_FAMILIES[name], oracle, NUM_TOKENS)

    return make


@pytest.fixture(params=sorted(VISION_FAMILIES))
def model(request: pytest.FixtureRequest, family_model: Callable[[str], FamilyModel]) -> FamilyModel:
    return family_model(request.param)


@pytest.fixture
def qwen(family_model: Callable[[str], FamilyModel]) -> FamilyModel:
    return family_model("qwen2_vl")


def greedy(**params: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=NUM_TOKENS, **params)


def check(llm: LLM, cases: Sequence[MediaCase], **params: Any) -> None:
    completions = llm.complete(
        [case.prompt for case in cases],
        greedy(**params),
        multi_modal_data=[case.multi_modal_data for case in cases],
        use_tqdm=False,
    )
    for case, completion in zip(cases, completions, strict=True):
        assert completion.prompt_token_ids == case.prompt_token_ids, case.name
        for sequence in completion.sequences:
            assert sequence.token_ids == case.token_ids, case.name
    check_nothing_is_left(llm)


def media_request(case: MediaCase) -> EngineRequest:
    kinds: tuple[tuple[Kind, list[Any]], ...] = (("image", case.images), ("video", case.videos))
    media = [from_object(kind, f"{kind}.{index}", each) for kind, given in kinds for index, each in enumerate(given)]
    prompt = MediaPrompt(media, text=case.prompt)
    if not media:
        return EngineRequest(f"{case.name}", np.array(case.prompt_token_ids, np.int32), greedy())
    return EngineRequest(f"{case.name}", np.empty(0, np.int32), greedy(), media=prompt)


def check_nothing_is_left(llm: LLM) -> None:
    engine = llm.llm_engine
    engine.step()
    assert engine.multi_modal_processor.num_held_bytes == 0
    assert engine.num_media == engine.num_tracked == 0
    assert engine.scheduler.num_free_blocks == engine.scheduler.num_blocks


def test_every_family_is_tried() -> None:
    assert set(KNOWN_FAMILIES) == set(VISION_FAMILIES)


def test_all_together_and_again(model: FamilyModel) -> None:
    path, _, cases = model
    with LLM(str(path), **ENGINE) as llm:
        check(llm, cases)
        engine = llm.llm_engine
        num_computed, num_cached = engine.num_media_computed, engine.scheduler.num_cached_tokens
        assert num_computed > 0
        check(llm, cases)
        assert engine.num_media_computed == num_computed, "an embedding was computed a second time"
        assert engine.scheduler.num_cached_tokens > num_cached


def test_in_chunks_that_end_within_images_without_zero_overhead_scheduling(model: FamilyModel) -> None:
    path, _, cases = model
    sees_whole_images = KNOWN_FAMILIES[path.name].sees_whole_images
    options = {
        "max_num_batched_tokens": 300 if sees_whole_images else 101,
        "enable_prefix_caching": False,
        "zero_overhead_scheduling": False,
        "media_cache_bytes": 0,
    }
    with LLM(str(path), **ENGINE | options) as llm:
        check(llm, cases[-3:])


def test_forced_preemption(model: FamilyModel) -> None:
    """Four sequences of one prompt have room for it once, and for a few tokens of their own."""
    path, _, cases = model
    case = max(cases, key=lambda each: len(each.prompt_token_ids))
    num_blocks = -(-len(case.prompt_token_ids) // BLOCK_SIZE) + 3
    with LLM(str(path), **ENGINE | {"num_gpu_blocks_override": num_blocks, "enable_prefix_caching": False}) as llm:
        check(llm, [case], n=4)
        assert llm.llm_engine.scheduler.num_preemptions > 0


def test_other_content_of_the_same_size_is_not_taken_for_it(qwen: FamilyModel) -> None:
    path, oracle, _ = qwen
    image = VISION_FAMILIES[path.name].image
    first, second = (
        oracle.answer(f"What is this? {image} Say it.", [picture(140, 140, seed)], num_tokens=NUM_TOKENS)
        for seed in (8, 9)
    )
    assert first.prompt_token_ids == second.prompt_token_ids
    with LLM(str(path), **ENGINE) as llm:
        for case in (first, second, first):
            check(llm, [case])


def test_several_sequences_of_one_prompt(qwen: FamilyModel) -> None:
    path, _, cases = qwen
    with LLM(str(path), **ENGINE) as llm:
        check(llm, cases[:3], n=3)


def test_drafts_from_the_text_so_far(qwen: FamilyModel) -> None:
    path, _, cases = qwen
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    with LLM(str(path), speculative_config=drafts, **ENGINE) as llm:
        check(llm, cases)


LAYOUTS: list[tuple[str, dict[str, Any]]] = [
    ("llava", {"tensor_parallel_size": 2}),
    ("qwen2_vl", {"tensor_parallel_size": 2}),
    ("gemma3", {"tensor_parallel_size": 2}),
    ("qwen2_vl", {"data_parallel_size": 2, "data_parallel_lockstep": True}),
]


@pytest.mark.parametrize(("family", "layout"), LAYOUTS)
def test_several_processes(family_model: Callable[[str], FamilyModel], family: str, layout: dict[str, Any]) -> None:
    path, _, cases = family_model(family)
    with LLM(str(path), **layout, **ENGINE) as llm:
        completions = llm.complete(
            [case.prompt for case in cases],
            greedy(),
            multi_modal_data=[case.multi_modal_data for case in cases],
            use_tqdm=False,
        )
    assert [each.sequences[0].token_ids for each in completions] == [case.token_ids for case in cases]
    assert [each.prompt_token_ids for each in completions] == [case.prompt_token_ids for case in cases]


def test_a_conversation_with_media_as_objects_files_and_data_urls(model: FamilyModel, tmp_path: Path) -> None:
    path, oracle, _ = model
    image = picture(120, 90, 1)
    file = tmp_path / "image.png"
    file.write_bytes(encoded(image))

    def messages(given: Any) -> list[dict[str, Any]]:
        parts = [{"type": "image", "image": given}, {"type": "text", "text": "What is it?"}]
        return [{"role": "user", "content": parts}]

    prompt, expected = oracle.chat(messages(image), num_tokens=NUM_TOKENS)
    with LLM(str(path), decode_sequence=False, **ENGINE) as llm:
        results = llm.chat([messages(image), messages(file), messages(encoded(image))], greedy(), use_tqdm=False)
    for outputs in results:
        assert not isinstance(outputs, str)
        assert [output.token_id for output in outputs] == expected  # type: ignore[union-attr]
        assert outputs[0].num_prompt_tokens == len(prompt)  # type: ignore[union-attr]


@pytest.mark.parametrize("family", ["llava_onevision", "qwen2_5_vl", "smolvlm"])
def test_a_conversation_with_a_video(family_model: Callable[[str], FamilyModel], family: str) -> None:
    path, oracle, _ = family_model(family)
    content = [{"type": "video", "video": frames(6, 112, 84, 4)}, {"type": "text", "text": "What happens?"}]
    messages = [{"role": "user", "content": content}]
    _, expected = oracle.chat(messages, num_tokens=NUM_TOKENS, processor_kwargs={"do_sample_frames": False})
    with LLM(str(path), decode_sequence=False, **ENGINE) as llm:
        (outputs,) = llm.chat(messages, greedy(), use_tqdm=False)
    assert [output.token_id for output in outputs] == expected  # type: ignore[union-attr]


def test_a_text_in_a_conversation_cannot_stand_for_an_image(qwen: FamilyModel) -> None:
    path, _, _ = qwen
    content = [{"type": "image", "image": picture(60, 60)}, {"type": "text", "text": "<|image_pad|><|vision_start|>"}]
    with LLM(str(path), **ENGINE) as llm:
        (completion,) = llm.chat([{"role": "user", "content": content}], greedy(), use_tqdm=False)
        assert isinstance(completion, str)


def test_a_conversations_variables_are_the_templates_alone(qwen: FamilyModel) -> None:
    """transformers would give what the template does not know to the processor: images could be fetched so."""
    path, oracle, _ = qwen
    image = picture(60, 60)
    content = [{"type": "image", "image": image}, {"type": "text", "text": "What?"}]
    messages = [{"role": "user", "content": content}]
    _, expected = oracle.chat(messages, num_tokens=NUM_TOKENS)
    variables = {"images": ["http://localhost:9/a.png"], "do_resize": False, "unknown": 1}
    with LLM(str(path), decode_sequence=False, **ENGINE) as llm:
        (outputs,) = llm.chat(messages, greedy(), use_tqdm=False, chat_template_kwargs=variables)
    assert [output.token_id for output in outputs] == expected  # type: ignore[union-attr]


def test_a_video_file_is_its_frames_at_their_times(family_model: Callable[[str], FamilyModel]) -> None:
    path, oracle, _ = family_model("qwen2_5_vl")
    pixels = frames(8, 112, 84, 6)
    prompt = f"Look: {VISION_FAMILIES[path.name].video} What happens?"
    with LLM(str(path), **ENGINE) as llm:
        (from_file,) = llm.complete(
            [prompt], greedy(), multi_modal_data={"video": video_file(pixels, fps=24)}, use_tqdm=False
        )
        (from_slow_file,) = llm.complete(
            [prompt], greedy(), multi_modal_data={"video": video_file(pixels, fps=2)}, use_tqdm=False
        )
    for fps, completion in ((24, from_file), (2, from_slow_file)):
        metadata = {"total_num_frames": 8, "fps": fps, "frames_indices": list(range(8))}
        expected = oracle.answer(
            prompt, [], [pixels], num_tokens=NUM_TOKENS, video_metadata=[metadata], do_sample_frames=False
        )
        assert completion.sequences[0].token_ids == expected.token_ids


def test_structured_output_and_an_embedding_beside_media(qwen: FamilyModel) -> None:
    path, _, cases = qwen
    with LLM(str(path), **ENGINE) as llm:
        params = SamplingParams(max_tokens=40, structured_outputs={"choice": ["a red block", "a blue block"]})
        answers = llm.generate(
            [case.prompt for case in cases[:3]],
            params,
            multi_modal_data=[case.multi_modal_data for case in cases[:3]],
            use_tqdm=False,
        )
        assert set(answers) <= {"a red block", "a blue block"}
        check_nothing_is_left(llm)


def test_adapters_change_the_text_part_and_nothing_else(qwen: FamilyModel, tmp_path: Path) -> None:
    path, _, cases = qwen
    adapter = make_random_adapter(
        path,
        tmp_path / "adapter",
        seed=1,
        model_class=AutoModelForImageTextToText,
        target_modules=r".*language_model.*(q_proj|down_proj)",
    )
    of_vision = make_random_adapter(
        path,
        tmp_path / "vision",
        seed=1,
        model_class=AutoModelForImageTextToText,
        target_modules=r".*visual.*qkv",
    )
    merged = shutil.copytree(path, tmp_path / "merged")
    model: Any = merged_model(path, adapter, AutoModelForImageTextToText)
    model.save_pretrained(merged)
    oracle = VisionOracle(merged)
    expected = [
        oracle.answer(case.prompt, case.images, case.videos, name=case.name, num_tokens=NUM_TOKENS) for case in cases
    ]
    assert [case.token_ids for case in expected] != [case.token_ids for case in cases]
    with LLM(str(path), lora_modules={"tuned": str(adapter)}, **ENGINE) as llm:
        check(llm, expected, lora_name="tuned")
        check(llm, cases)
    with pytest.raises(ConfigError, match="belongs to the model's vision part"):
        LLM(str(path), lora_modules={"tuned": str(of_vision)}, **ENGINE)


def test_a_conversation_of_text_alone(model: FamilyModel) -> None:
    path, oracle, _ = model
    messages = [{"role": "user", "content": [{"type": "text", "text": "Only words."}]}]
    _, expected = oracle.chat(messages, num_tokens=NUM_TOKENS)
    with LLM(str(path), decode_sequence=False, **ENGINE) as llm:
        for each in (messages, [{"role": "user", "content": "Only words."}]):
            (outputs,) = llm.chat(each, greedy(), use_tqdm=False)
            assert [output.token_id for output in outputs] == expected  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("prompt", "data", "reason"),
    [
        ("no placeholder", {"image": [picture(60, 60)]}, "image: the model's processor refuses them: "),
        ("{image}{image}", {"image": [picture(60, 60)]}, "image: the model's processor refuses them: "),
        ("{image}", {"image": [b"not an image"]}, r"image\.0 is not an image"),
        ("{image}", {"image": [picture(60, 60)] * 17}, r"17 images: must have at most 16 \(limit_mm_per_prompt\)"),
        ("{image}", {"audio": [1]}, "multi_modal_data has 'audio'"),
        ("{image}", {"image": [encoded(picture(2100, 2100))]}, r"must have at most 4000000 \(max_image_pixels\)"),
        ("{image}", {"image": [bytes(1_000_001)]}, r"1000001 bytes: must have at most 1000000 \(max_media_bytes\)"),
    ],
)
def test_what_cannot_be_is_refused_by_name_and_hurts_nobody(
    qwen: FamilyModel, prompt: str, data: dict[str, Any], reason: str
) -> None:
    path, _, cases = qwen
    options = {"max_image_pixels": 4_000_000, "max_media_bytes": 1_000_000}
    with LLM(str(path), **ENGINE | options) as llm:
        text = prompt.format(image=VISION_FAMILIES["qwen2_vl"].image)
        with pytest.raises(InvalidRequestError, match=reason):
            llm.complete([text], greedy(), multi_modal_data=data, use_tqdm=False)
        check(llm, cases[:1])


def test_a_medium_that_cannot_be_encoded_fails_its_request_alone(
    qwen: FamilyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others in its step have their own tokens; nobody finds later what was computed of it."""
    path, _, cases = qwen
    spoiled = cases[0]
    others = [case for case in cases if case.name in ("text", "a video")]
    with EngineDriver(path, block_size=BLOCK_SIZE, num_gpu_blocks_override=1000, enable_prefix_caching=True) as driver:
        encode = VisionLanguageModel.encode

        def encode_videos_alone(self: VisionLanguageModel, tensors: dict[str, Any]) -> Any:
            if "pixel_values" in tensors:
                raise RuntimeError("out of memory")
            return encode(self, tensors)

        monkeypatch.setattr(VisionLanguageModel, "encode", encode_videos_alone)
        for _ in range(2):
            requests = [media_request(case) for case in (spoiled, *others)]
            failure, *answers = driver.run(requests)
            assert isinstance(failure, EngineError)
            assert "its media cannot be encoded" in failure.message
            for answer, case in zip(answers, others, strict=True):
                assert not isinstance(answer, DeepInferError)
                assert answer[0].token_ids == case.token_ids
        monkeypatch.setattr(VisionLanguageModel, "encode", encode)
        (answer,) = driver.run([media_request(spoiled)])
        assert not isinstance(answer, DeepInferError)
        assert answer[0].token_ids == spoiled.token_ids
        driver.check_nothing_is_left()


def test_an_image_that_no_step_can_compute_is_refused(family_model: Callable[[str], FamilyModel]) -> None:
    path, _, cases = family_model("gemma3")
    with LLM(str(path), max_num_batched_tokens=200, **ENGINE) as llm:
        with pytest.raises(InvalidRequestError, match=r"256 tokens must be computed in one step, .* 200"):
            llm.complete(cases[0].prompt, greedy(), multi_modal_data=cases[0].multi_modal_data, use_tqdm=False)
        check_nothing_is_left(llm)


def test_a_model_of_text_refuses_images(tmp_path: Path) -> None:
    with LLM(**ENGINE) as llm, pytest.raises(InvalidRequestError, match=r"image\.0 is set: .* takes no images"):
        llm.generate("<image>", greedy(), multi_modal_data={"image": picture(60, 60)})

"""The engine in a process of its own: same tokens, and no end of it goes unnoticed."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deepinfer_backend import LLM, RequestOutput, SamplingParams
from deepinfer_backend.config import EngineConfig
from deepinfer_backend.engine.engine_client import EngineClient, RequestFailure
from deepinfer_backend.engine.engine_process import AttachedEngineClient, ChildEngineClient
from deepinfer_backend.engine.messages import EngineRequest
from deepinfer_backend.errors import EngineDeadError, EngineError, InvalidRequestError, UnavailableError
from tests.support.models import make_random_model

TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    path = make_random_model("llama", tmp_path_factory.mktemp("models"))
    return EngineConfig(model=str(path), dtype="float32", device="cpu", num_gpu_blocks_override=64)


@pytest.fixture
def client(config: EngineConfig) -> Iterator[ChildEngineClient]:
    client = ChildEngineClient(config)
    yield client
    client.close()


@pytest.fixture
def link(tmp_path: Path) -> Path:
    """Where others find an engine."""
    return tmp_path / "engine"


def request(request_id: str, prompt: list[int], max_tokens: int) -> EngineRequest:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return EngineRequest(request_id, np.array(prompt, dtype=np.int32), params)


def collect(client: EngineClient, num_requests: int) -> dict[str, list[RequestOutput]]:
    outputs: dict[str, list[RequestOutput]] = {}
    num_finished = 0
    while num_finished < num_requests:
        round_outputs = client.get_outputs(TIMEOUT_S)
        assert round_outputs is not None and not round_outputs.failures
        for output in round_outputs.outputs:
            outputs.setdefault(output.request_id, []).append(output)
            num_finished += output.finished
    return outputs


def test_tokens_are_those_of_the_engine_in_this_process(client: ChildEngineClient, config: EngineConfig) -> None:
    prompts = [[5 + index, 17, 40] * (index + 1) for index in range(6)]
    for index, prompt in enumerate(prompts):
        client.add_request(request(str(index), prompt, 10 + index))
    outputs = collect(client, len(prompts))
    with LLM(decode_sequence=False, **config.model_dump(exclude_unset=True)) as llm:
        params = [SamplingParams(temperature=0, max_tokens=10 + index, ignore_eos=True) for index in range(6)]
        expected: Any = llm.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)
    for index, result in enumerate(expected):
        assert [o.token_id for o in outputs[str(index)]] == [o.token_id for o in result]


def test_refused_request_is_told_and_disturbs_nobody(client: ChildEngineClient) -> None:
    client.add_request(request("good", [5, 6, 7], 5))
    client.add_request(request("bad", [5] * 1024, 5))  # 64 blocks of 16 hold that many, and no output
    failures: list[RequestFailure] = []
    finished = False
    while not (failures and finished):
        round_outputs = client.get_outputs(TIMEOUT_S)
        assert round_outputs is not None
        failures += round_outputs.failures
        finished |= any(output.finished for output in round_outputs.outputs)
    (failure,) = failures
    assert failure.request_id == "bad"
    assert isinstance(failure.error, InvalidRequestError)
    assert "1024 tokens" in str(failure.error)


def test_aborted_request_frees_its_blocks(client: ChildEngineClient) -> None:
    client.add_request(request("a", [5, 6, 7], 900))
    while (round_outputs := client.get_outputs(TIMEOUT_S)) is not None and not round_outputs.outputs:
        pass
    assert round_outputs is not None
    client.abort_requests(["a", "unknown"])
    while (round_outputs := client.get_outputs(TIMEOUT_S)) is not None:
        assert round_outputs.stats is not None
        if round_outputs.stats.num_used_blocks == 0:
            break
    assert client.get_outputs(0.05) is None


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_death_is_told_at_once_and_again(client: ChildEngineClient, number: signal.Signals) -> None:
    client.add_request(request("a", [5, 6, 7], 900))
    os.kill(client.pid, number)
    with pytest.raises(EngineDeadError):
        while True:
            client.get_outputs(TIMEOUT_S)
    with pytest.raises(EngineDeadError):
        client.get_outputs(TIMEOUT_S)
    with pytest.raises(EngineDeadError):
        client.add_request(request("b", [5], 1))


def test_engine_that_cannot_start_says_why(config: EngineConfig) -> None:
    with pytest.raises(EngineError, match=r"max_model_len is 4096.*2048"):
        ChildEngineClient(config.model_copy(update={"max_model_len": 4096}))


def test_close_twice_leaves_no_process_and_no_folder(config: EngineConfig) -> None:
    client = ChildEngineClient(config)
    pid, folder = client.pid, Path(client._folder)
    client.close()
    client.close()
    assert not folder.exists()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_engine_ends_when_its_parent_is_killed(config: EngineConfig) -> None:
    program = (
        "import sys, time; from deepinfer_backend.config import EngineConfig\n"
        "from deepinfer_backend.engine.engine_process import ChildEngineClient\n"
        "client = ChildEngineClient(EngineConfig(**eval(sys.argv[1]))); print(client.pid, flush=True); time.sleep(600)"
    )
    arguments = [sys.executable, "-c", program, repr(config.model_dump(exclude_unset=True))]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        engine = os.pidfd_open(int(parent.stdout.readline()))
        parent.kill()
        ended, _, _ = select.select([engine], [], [], TIMEOUT_S)
        os.close(engine)
        assert ended


def test_clients_that_share_an_engine_get_their_own_outputs(config: EngineConfig, link: Path) -> None:
    owner = ChildEngineClient(config, link)
    attached = AttachedEngineClient(link, "attached", TIMEOUT_S)
    assert attached.info == owner.info
    # The same id twice would be refused: ids are unique among all clients' live requests.
    clients: dict[str, EngineClient] = {"owner": owner, "attached": attached}
    for name, client in clients.items():
        for index in range(3):
            client.add_request(request(f"{name} {index}", [5 + index, 17, 40], 10))
    outputs = {name: collect(client, 3) for name, client in clients.items()}
    for index in range(3):
        tokens = [[each.token_id for each in outputs[name][f"{name} {index}"]] for name in clients]
        assert tokens[0] == tokens[1]
        assert len(tokens[0]) == 10
    attached.close()
    owner.close()
    assert not link.is_symlink()


def test_a_client_that_leaves_ends_its_requests_and_nobody_elses(config: EngineConfig, link: Path) -> None:
    owner = ChildEngineClient(config, link)
    attached = AttachedEngineClient(link, "attached", TIMEOUT_S)
    attached.add_request(request("long", [5, 6, 7], 900))
    assert attached.get_outputs(TIMEOUT_S) is not None
    attached.close()
    assert wait_until_unused(owner)
    owner.add_request(request("short", [5, 6, 7], 5))
    collect(owner, 1)
    owner.close()


def test_an_attached_client_that_is_killed_ends_its_requests(config: EngineConfig, link: Path) -> None:
    owner = ChildEngineClient(config, link)
    program = (
        "import sys; from pathlib import Path; import numpy as np; from deepinfer_backend import SamplingParams\n"
        "from deepinfer_backend.engine.engine_process import AttachedEngineClient\n"
        "from deepinfer_backend.engine.messages import EngineRequest\n"
        "client = AttachedEngineClient(Path(sys.argv[1]), 'killed', 60)\n"
        "params = SamplingParams(max_tokens=900, ignore_eos=True)\n"
        "client.add_request(EngineRequest('a', np.array([5], np.int32), params))\n"
        "client.get_outputs(60); print('running', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(link)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"running\n"
        other.kill()
        assert wait_until_unused(owner)
    owner.close()


def test_an_attached_client_is_told_of_the_engines_death(config: EngineConfig, link: Path) -> None:
    owner = ChildEngineClient(config, link)
    attached = AttachedEngineClient(link, "attached", TIMEOUT_S)
    os.kill(owner.pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError):
        attached.get_outputs(TIMEOUT_S)
    with pytest.raises(EngineDeadError):
        attached.add_request(request("b", [5], 1))
    attached.close()
    owner.close()


def test_attaching_where_there_is_no_engine_fails_in_time(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="no engine"):
        AttachedEngineClient(tmp_path / "nothing", "attached", 0.1)


def test_a_folder_that_others_can_write_is_no_engines(link: Path) -> None:
    link.mkdir(mode=0o777)
    link.chmod(0o777)
    with pytest.raises(UnavailableError, match="no engine"):
        AttachedEngineClient(link, "attached", 0.1)


def test_an_engine_that_drains_is_not_in_the_way_of_the_next_one(config: EngineConfig, link: Path) -> None:
    draining = ChildEngineClient(config, link)
    old = AttachedEngineClient(link, "old", TIMEOUT_S)
    following = ChildEngineClient(config, link)
    old.add_request(request("old", [5, 6, 7], 5))
    collect(old, 1)
    draining.close()
    new = AttachedEngineClient(link, "new", TIMEOUT_S)
    new.add_request(request("new", [5, 6, 7], 5))
    collect(new, 1)
    for client in (old, new, following):
        client.close()
    assert not link.is_symlink()


def wait_until_unused(owner: ChildEngineClient) -> bool:
    """Until the engine says that no block is in use; only its owner is told unasked."""
    for _ in range(1000):
        round_outputs = owner.get_outputs(1.0)
        if round_outputs is not None and round_outputs.stats is not None and not round_outputs.stats.num_used_blocks:
            return True
    return False

"""Hidden states that stay on a device, in the real server; here it is the CPU, which takes the same path."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from angelspec_client import GrpcClient
from checks import free_ports
from server import ServerOptions, TritonServer
from server_config import bundled_drafters
from serving import CHAT, PROMPT, Endpoint, read_while_killing, stub_pid

KINDS = ("mtp", "dfly")
PROMPTS = (PROMPT, PROMPT + " a very long story." * 40)  # the second is computed in several steps
GREEDY = {"max_tokens": 32, "temperature": 0.0, "seed": 5, "ignore_eos": True}
SAMPLED = {"max_tokens": 32, "temperature": 0.8, "seed": 1234, "ignore_eos": True}


@contextmanager
def serving(target_dir: Path, run_dir: Path, place: str, **more) -> Iterator[TritonServer]:
    config = {
        "target": str(target_dir),
        "drafters": ",".join(KINDS),
        "drafter": KINDS[0],
        "hidden_states_on": place,
        "adaptive_drafts": False,
        "lookup": False,  # every draft is a network's
        "max_batch_tokens": 64,
        "max_context": 512,
        "num_blocks": 256,
        **{kind: folder for kind, folder in bundled_drafters("").items() if kind in KINDS},
        **more,
    }
    with TritonServer(ServerOptions(*free_ports(3), config=config, run_dir=run_dir)) as running:
        running.wait_until_ready()
        yield running


@pytest.fixture(scope="module")
def on_device(target_dir, tmp_path_factory):
    with serving(target_dir, tmp_path_factory.mktemp("device"), "device") as running:
        yield running


@pytest.fixture(scope="module")
def client(on_device):
    with GrpcClient(Endpoint(on_device.options).grpc) as client:
        yield client


def has_torch(server: TritonServer, model: str) -> bool:
    return "libtorch" in Path(f"/proc/{stub_pid(server, model)}/maps").read_text()


def answers(client: GrpcClient) -> list[tuple[list[int], int, int]]:
    """Of each drafter and prompt, twice, the second time with the prompt in the prefix cache: tokens, drafts,
    accepted drafts."""
    return [
        (result.token_ids, result.total_draft_tokens, result.total_accepted_draft_tokens)
        for drafter in KINDS
        for prompt in ({"prompt": PROMPTS[0]}, {"prompt": PROMPTS[1]}, {"messages": CHAT})
        for options in (GREEDY, SAMPLED)
        for _ in range(2)
        for result in [client.generate(**prompt, drafter=drafter, num_draft_tokens=4, **options)]
    ]


def test_texts_and_accepted_drafts_are_the_same_as_through_the_cpu(target_dir, on_device, client, tmp_path):
    assert has_torch(on_device, "angelspec")
    found = answers(client)
    with serving(target_dir, tmp_path, "cpu") as through_cpu:
        assert not has_torch(through_cpu, "angelspec")
        with GrpcClient(Endpoint(through_cpu.options).grpc) as other:
            assert found == answers(other)
    per_drafter = len(found) // len(KINDS)
    for some in (found[:per_drafter], found[per_drafter:]):
        assert 0 < sum(accepted for _, _, accepted in some) < sum(drafted for _, drafted, _ in some)


@pytest.mark.parametrize("model", ["drafter", "target"])
def test_streams_go_on_with_the_same_tokens_when_a_model_process_is_killed(on_device, client, model):
    options = {"max_tokens": 120, "temperature": 1.0, "ignore_eos": True}
    expected = [client.generate(PROMPT, drafter="none", seed=seed, **options) for seed in range(2)]
    streams = [client.stream(PROMPT, drafter=KINDS[seed], seed=seed, **options) for seed in range(2)]
    results = read_while_killing(on_device, model, streams)
    assert [r.token_ids for r in results] == [e.token_ids for e in expected]
    assert all(result.total_accepted_draft_tokens > 0 for result in results)


def test_sequences_of_both_drafters_that_push_each_other_out_give_their_texts(target_dir, tmp_path):
    options = {"max_tokens": 80, "temperature": 0.8, "ignore_eos": True}
    drafters = [(*KINDS, "none")[i % 3] for i in range(6)]
    prompts = [f"{i}. {PROMPTS[1]}" for i in range(6)]
    with (
        # Blocks for one of the longest: two prompts fit, their answers do not.
        serving(target_dir, tmp_path, "device", num_blocks=33) as running,
        GrpcClient(Endpoint(running.options).grpc) as client,
        ThreadPoolExecutor(6) as pool,
    ):
        alone = [client.generate(prompts[i], drafter="none", seed=i, **options) for i in range(6)]
        results = list(
            pool.map(lambda i: client.generate(prompts[i], drafter=drafters[i], seed=i, **options), range(6))
        )
    assert [each.token_ids for each in results] == [each.token_ids for each in alone]
    assert sum(each.total_accepted_draft_tokens for each in results) > 0

"""Trained kinds of drafters in the real server, with random weights: wrong drafts harm nobody."""

from __future__ import annotations

import os
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from angelspec_backend.drafters.checkpoint import export_drafter
from angelspec_backend.drafters.target_parts import TargetParts
from angelspec_client import GrpcClient, ServerBusy
from checks import free_ports
from random_drafters import random_drafter
from server import ServerOptions, TritonServer
from serving import CHAT, PROMPT, Endpoint, read_while_killing, stub_pid

KINDS = ("dfly", "mtp")
GREEDY = {"max_tokens": 24, "temperature": 0.0, "seed": 5, "ignore_eos": True}
SAMPLED = {"max_tokens": 24, "temperature": 1.0, "top_p": 0.9, "seed": 1234, "ignore_eos": True}


@pytest.fixture(scope="module")
def checkpoints(target_dir, tmp_path_factory) -> dict[str, str]:
    """A random drafter of each kind for the default target."""
    parts = TargetParts.load(str(target_dir), torch.bfloat16)
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in KINDS}
    for kind, folder in folders.items():
        export_drafter(random_drafter(kind, parts, taps=(1, 14, 27)), folder)
    return {kind: str(folder) for kind, folder in folders.items()}


@pytest.fixture(scope="module")
def served(target_dir, checkpoints, tmp_path_factory):
    config = {
        "target": str(target_dir),
        "drafters": ",".join(("ngram", *KINDS)),
        "drafter": "dfly",
        "adaptive_drafts": False,  # which would give up on them
        "max_batch_tokens": 64,
        "num_blocks": 512,
        **checkpoints,
    }
    options = ServerOptions(*free_ports(3), config=config, run_dir=tmp_path_factory.mktemp("served"))
    with TritonServer(options) as running:
        running.wait_until_ready()
        yield running


@pytest.fixture(scope="module")
def client(served):
    with GrpcClient(Endpoint(served.options).grpc) as client:
        yield client


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_every_drafter_gives_the_text_of_plain_decoding(client, options):
    long = PROMPT + " a very long story." * 40  # computed in several steps
    for prompt in ({"messages": CHAT}, {"prompt": long}):
        plain = client.generate(**prompt, drafter="none", **options)
        for drafter in (*KINDS, "ngram"):
            for k in (1, 7):
                result = client.generate(**prompt, drafter=drafter, num_draft_tokens=k, **options)
                assert result.token_ids == plain.token_ids, (drafter, k)
                assert result.total_draft_tokens > 0 or drafter == "ngram"


def test_requests_of_all_drafters_together_give_the_texts_they_give_alone(client):
    plain = [client.generate(messages=CHAT, drafter="none", **(SAMPLED | {"seed": i})) for i in range(8)]
    with ThreadPoolExecutor(8) as pool:
        results = pool.map(
            lambda i: client.generate(
                messages=CHAT, drafter=(*KINDS, "ngram", "none")[i % 4], **(SAMPLED | {"seed": i})
            ),
            range(8),
        )
        assert [result.token_ids for result in results] == [each.token_ids for each in plain]


@pytest.mark.parametrize("model", ["drafter", "target"])
def test_streams_go_on_with_the_same_tokens_when_a_model_process_is_killed(served, client, model):
    options = {"max_tokens": 120, "temperature": 1.0, "ignore_eos": True}
    expected = [client.generate(PROMPT, drafter="none", seed=seed, **options) for seed in range(2)]
    streams = [client.stream(PROMPT, drafter=KINDS[seed], seed=seed, **options) for seed in range(2)]
    results = read_while_killing(served, model, streams)
    assert [r.token_ids for r in results] == [e.token_ids for e in expected]
    assert all(result.total_draft_tokens > 0 for result in results)
    after = client.generate(PROMPT, drafter="mtp", max_tokens=8, ignore_eos=True)
    assert (after.num_output_tokens, after.total_draft_tokens > 0) == (8, True)


def test_a_drafter_that_cannot_be_loaded_does_not_stop_the_server(target_dir, checkpoints, tmp_path):
    parts = TargetParts(*(torch.zeros(100, 64) for _ in range(2)), torch.ones(64), 1e-5, 30)
    export_drafter(random_drafter("dfly", parts), tmp_path / "other")
    mtp = shutil.copytree(checkpoints["mtp"], tmp_path / "mtp")
    config = {"target": str(target_dir), "drafters": "ngram,dfly,mtp", "drafter": "dfly"}
    config |= {"dfly": str(tmp_path / "other"), "mtp": str(mtp), "adaptive_drafts": False}
    options = ServerOptions(*free_ports(3), config=config, run_dir=tmp_path / "run")
    with TritonServer(options) as running, GrpcClient(Endpoint(options).grpc) as client:
        running.wait_until_ready()
        plain = client.generate(messages=CHAT, **GREEDY)  # dfly was only the default
        assert plain.total_draft_tokens == 0
        with pytest.raises(
            ServerBusy, match=r"drafter 'dfly' could not be loaded: other: .* is 64"
        ) as caught:
            client.generate(messages=CHAT, drafter="dfly", **GREEDY)
        assert str(tmp_path) not in str(caught.value)
        log = (options.folder / "server.log").read_text()
        assert log.count("drafter 'dfly' cannot be loaded, requests go on without it") == 1
        assert "Traceback" not in log

        def drafts(drafter: str) -> int:
            result = client.generate(messages=CHAT, drafter=drafter, **GREEDY)
            assert result.token_ids == plain.token_ids
            return result.total_draft_tokens

        assert drafts("ngram") > 0 < drafts("mtp")
        shutil.rmtree(mtp)  # it cannot be loaded again either
        os.kill(stub_pid(running, "drafter"), signal.SIGKILL)
        assert (drafts("mtp"), drafts("ngram") > 0) == (0, True)

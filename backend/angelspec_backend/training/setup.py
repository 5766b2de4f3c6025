"""From a configuration to a trainer: data, target, network."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from angelspec_backend.drafters.chain import ChainNetwork
from angelspec_backend.drafters.checkpoint import DrafterNetwork
from angelspec_backend.drafters.target_parts import TargetParts
from angelspec_backend.engine.loader import load_tokenizer
from angelspec_backend.training.block_step import BlockStep
from angelspec_backend.training.build import build_network, identify, tap_ids
from angelspec_backend.training.chain_step import ChainStep
from angelspec_backend.training.checkpoint import write_durably
from angelspec_backend.training.config import TrainConfig
from angelspec_backend.training.conversation import ChatFormat
from angelspec_backend.training.corpus import ANSWERS, Corpus, CorpusFiles, load_corpus
from angelspec_backend.training.distributed import Processes
from angelspec_backend.training.evaluate import GetFeatures, Step
from angelspec_backend.training.features import FeatureCache, TargetFeatures
from angelspec_backend.training.trainer import Trainer
from angelspec_backend.training.vocab import count_tokens, coverage, frequent_tokens, mask_token


def make_trainer(config: TrainConfig, processes: Processes) -> Trainer:
    """Load everything a run needs.

    Raises:
        CheckpointError, LoadError, RecordError, TemplateError, TrainConfigError, ValueError: what is wrong.
    """
    run = config.run
    if run.threads:
        torch.set_num_threads(run.threads)
    torch.manual_seed(run.seed)
    say = print if processes.is_main else _quiet
    parts = TargetParts.load(config.target, getattr(torch, run.dtype), str(processes.device))
    taps = tap_ids(config.drafter, parts.num_layers)
    tokenizer = load_tokenizer(config.target)
    files = CorpusFiles(config.data.conversations, config.data.text, _known_limits(run.out)).counted()
    train, held_out = load_corpus(
        files, ChatFormat(tokenizer, ()), config.data.row_length, config.data.held_out
    )
    processes.barrier()
    if processes.is_main:
        limits = json.dumps(files.limits, indent=1).encode()
        write_durably(_limits_file(run.out), lambda file: file.write(limits))

    target = TargetFeatures(config.target, parts, taps, max_tokens=max(2048, config.data.row_length))
    counts = count_tokens(train, parts.vocab_size)
    vocab = frequent_tokens(train, parts.vocab_size, config.drafter.draft_vocab_size)
    mask = config.drafter.mask_token_id
    if mask is None:
        reserved = frozenset(int(token) for token in tokenizer.all_special_ids)
        mask = mask_token(counts, reserved)
    network = build_network(
        config.drafter, config.target, parts, vocab, mask, identify(config.target, tokenizer)
    )
    trained = sum(parameter.numel() for parameter in network.parameters())
    say(f"{len(train.documents)} documents of {train.num_tokens} tokens, {int(counts.sum())} to be predicted")
    say(f"{len(held_out.documents)} documents held out")
    say(f"{config.drafter.kind}: {trained / 1e6:.1f} M parameters, taps {list(taps)}")
    for group in (*ANSWERS, "text"):
        found = count_tokens(train, parts.vocab_size, (group,))
        if found.any():
            say(f"the draft vocabulary covers {coverage(found, network.vocab):.2%} of the tokens of {group}")
    features, held_out_features = (_provider(config, target, corpus, say) for corpus in (train, held_out))
    step = _step(config, network, parts)
    return Trainer(config, processes, network, step, train, held_out, features, held_out_features)


def _step(config: TrainConfig, network: DrafterNetwork, parts: TargetParts) -> Step:
    run = config.run
    if isinstance(network, ChainNetwork):
        return ChainStep(
            network,
            parts.lm_head,
            config.step_objective,
            config.drafter.num_steps,
            config.anchor_density,
            config.drafter.on_policy,
            run.chunk,
            run.recompute,
        )
    return BlockStep(network, config.objective, config.anchor_density, run.chunk, run.recompute)


def _provider(config: TrainConfig, target: TargetFeatures, corpus: Corpus, say: object) -> GetFeatures:
    folder = config.data.feature_cache
    if folder is None or not corpus.documents:
        return lambda documents: target.compute([corpus.documents[index].token_ids for index in documents])
    size = corpus.num_tokens * target.bytes_per_token
    if callable(say):
        say(f"features of {corpus.num_tokens} tokens take {size / 1e9:.2f} GB in {folder}")
    return FeatureCache(target, corpus, folder).features


def _limits_file(out: Path) -> Path:
    return out / "data.json"


def _known_limits(out: Path) -> dict[str, int]:
    """Lines of each data file that the run in this folder was begun with."""
    file = _limits_file(out)
    return json.loads(file.read_text()) if file.exists() else {}


def _quiet(*_: object) -> None:
    pass

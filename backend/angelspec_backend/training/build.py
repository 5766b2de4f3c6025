"""A drafter to be trained: new, begun from layers of its target, or an exported one to be trained on."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from torch import Tensor

from angelspec_backend.drafters.blocks import BlockNetwork
from angelspec_backend.drafters.checkpoint import NETWORKS, DrafterNetwork, load_drafter
from angelspec_backend.drafters.draft_vocab import DraftVocab
from angelspec_backend.drafters.eagle3 import Eagle3, default_tap_ids
from angelspec_backend.drafters.layers import LayerShape
from angelspec_backend.drafters.mtp import MTP
from angelspec_backend.drafters.spec import DrafterSpec, TargetIdentity
from angelspec_backend.drafters.target_parts import TargetParts
from angelspec_backend.engine.loader import LoadError, Tokenizer
from angelspec_backend.engine.tensor_files import load_decoder_layer, rope_theta, text_config
from angelspec_backend.training.config import DrafterConfig, TrainConfigError


def tap_ids(config: DrafterConfig, num_layers: int) -> tuple[int, ...]:
    """The target layers that are read.

    Block drafters: spread evenly from layer 1 to the third last, as in AngelSpec.  num_layers: of the target.
    """
    if config.tap_ids:
        return tuple(sorted(config.tap_ids))
    if config.kind == "mtp":
        return (num_layers - 1,)
    if config.kind == "eagle3":
        return default_tap_ids(num_layers)
    taps = config.num_taps
    if taps == 1:
        return (num_layers // 2,)
    return tuple(sorted({round(1 + i * (num_layers - 4) / (taps - 1)) for i in range(taps)}))


def start_layers(config: DrafterConfig, num_layers: int) -> tuple[int, ...]:
    """The target layers that the drafter's layers begin as.

    Raises:
        TrainConfigError: there are not as many as the drafter has, or the target lacks one.
    """
    count = config.num_layers if config.is_block else 1
    layers = config.start_layers or tuple(range(num_layers - count, num_layers))
    if len(layers) != count or not all(0 <= layer < num_layers for layer in layers):
        raise TrainConfigError(
            f"drafter.start_layers is {list(layers)}, but must be {count} of the target's layers "
            f"0 to {num_layers - 1}"
        )
    return layers


def identify(path: str, tokenizer: Tokenizer) -> TargetIdentity:
    """Which target a drafter is trained for."""
    template = getattr(tokenizer, "chat_template", None) or ""
    return TargetIdentity(Path(path).name, "", hashlib.sha256(str(template).encode()).hexdigest(), "")


def build_network(
    config: DrafterConfig,
    path: str,
    target: TargetParts,
    vocab: DraftVocab | None,
    mask_token_id: int,
    identity: TargetIdentity,
) -> DrafterNetwork:
    """The network at the start of training, in fp32.

    path: folder or hub id of the target; mask_token_id: fills the slots of a block.

    Raises:
        LoadError: the target's layers are not of Llama's or Qwen3's kind, or a drafter cannot be read.
        TrainConfigError: the configuration does not fit the target.
    """
    if config.start not in ("target", "random"):
        return _exported(config, target, identity)
    layers = [load_decoder_layer(path, index) for index in start_layers(config, target.num_layers)]
    shape = _shape(path, layers[0])
    spec = _spec(config, shape, path, target, vocab, mask_token_id, identity)
    try:
        network = NETWORKS[config.kind](spec, target, vocab)
    except ValueError as error:
        raise TrainConfigError(f"drafter: {error}") from None
    network = network.float()
    if config.start == "target":
        with torch.no_grad():
            _begin(network, target, layers)
    return network


def _exported(config: DrafterConfig, target: TargetParts, identity: TargetIdentity) -> DrafterNetwork:
    spec, network = load_drafter(config.start, target, dtype=torch.float32, identity=identity)
    if spec.kind != config.kind:
        raise TrainConfigError(f"drafter.kind is {config.kind}, but {config.start} is {spec.kind}")
    for parameter in network.parameters():
        parameter.requires_grad_(True)
    return network


def _shape(path: str, layer: dict[str, Tensor]) -> LayerShape:
    settings = text_config(path)
    theta = rope_theta(settings)
    if theta is None or not {"self_attn.q_proj.weight", "mlp.gate_proj.weight"} <= layer.keys():
        raise LoadError(f"{path}: drafters are trained for targets of Llama's and Qwen3's kind; a layer has "
                        f"{', '.join(sorted(layer)[:6])}, ... and rope_theta is {theta}")  # fmt: skip
    heads = int(settings["num_attention_heads"])
    return LayerShape(
        hidden=int(settings["hidden_size"]),
        intermediate=layer["mlp.gate_proj.weight"].shape[0],
        num_heads=heads,
        num_kv_heads=int(settings.get("num_key_value_heads") or heads),
        head_dim=layer["self_attn.q_proj.weight"].shape[0] // heads,
        eps=float(settings["rms_norm_eps"]),
        rope_theta=theta,
        qk_norm="self_attn.q_norm.weight" in layer,
    )


def _spec(
    config: DrafterConfig,
    shape: LayerShape,
    path: str,
    target: TargetParts,
    vocab: DraftVocab | None,
    mask_token_id: int,
    identity: TargetIdentity,
) -> DrafterSpec:
    block, dspark = config.is_block, config.kind == "dspark"
    correction = shape.hidden if config.correction_size is None else config.correction_size
    return DrafterSpec(
        config.kind,
        shape,
        num_layers=config.num_layers if block else 1,
        vocab_size=target.vocab_size,
        target_hidden=target.hidden_size,
        tap_ids=tap_ids(config, target.num_layers),
        target_num_layers=target.num_layers,
        draft_vocab_size=0 if vocab is None else len(vocab),
        max_context=int(text_config(path).get("max_position_embeddings") or 0),
        block_size=config.block_size if block else 0,
        mask_token_id=mask_token_id if block else -1,
        label_shift=config.label_shift,
        correction_size=correction if config.kind == "dfly" else 0,
        markov_rank=config.markov_rank if dspark else 0,
        markov_kind=config.markov_kind,
        confidence_head=config.confidence_head and dspark,
        num_steps=0 if block else config.num_steps,
        target=identity,
    )


def _begin(network: DrafterNetwork, target: TargetParts, layers: list[dict[str, Tensor]]) -> None:
    """Copy the target's layers, and let everything around them begin as a plain connection."""
    assert target.norm is not None
    hidden = network.spec.shape.hidden
    if isinstance(network, BlockNetwork):
        for layer, weights in zip(network.layers, layers, strict=True):
            _copy(layer, weights)
        network.final_norm.weight.copy_(target.norm)
        norms = torch.stack([weights["input_layernorm.weight"].float() for weights in layers])
        network.context_norm.weight.copy_(norms.mean(0))  # one norm stands in for those of all layers
        if network.context_proj is not None:  # the mean of the taps, which DFly's fusion gives already
            mean = torch.eye(hidden) / len(network.spec.tap_ids)
            network.context_proj.weight.zero_()
            if network.layer_fusion_weights is None and network.spec.target_hidden == hidden:
                network.context_proj.weight.copy_(mean.repeat(1, len(network.spec.tap_ids)))
    elif isinstance(network, MTP):
        _copy(network.midlayer, layers[0])
        network.eh_proj.weight.copy_(torch.eye(hidden).repeat(1, 2))
        network.final_layernorm.weight.copy_(target.norm)
    elif isinstance(network, Eagle3):
        wide = {f"self_attn.{name}_proj.weight" for name in "qkv"}  # read the embedding's half as well
        _copy(network.midlayer, {
            name: torch.cat([torch.zeros_like(weight), weight], 1) if name in wide else weight
            for name, weight in layers[0].items()
        })  # fmt: skip
        network.midlayer.hidden_norm.weight.copy_(layers[0]["input_layernorm.weight"])
        network.norm.weight.copy_(target.norm)
        taps = len(network.spec.tap_ids)
        network.fc.weight.copy_(torch.cat([torch.zeros(hidden, (taps - 1) * hidden), torch.eye(hidden)], 1))


def _copy(layer: torch.nn.Module, weights: dict[str, Tensor]) -> None:
    """Weights by name; projections for the context begin as those for the block."""
    for name, parameter in layer.named_parameters():
        source = weights.get(name.replace("_proj_target", "_proj"))
        if source is not None:
            parameter.copy_(source)

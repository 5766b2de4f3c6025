"""Load and save drafters: our own format, and the published ones by a table of formats."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from pydantic import TypeAdapter, ValidationError

from angelspec_backend.drafters import block_formats, eagle3_format, mtp_format
from angelspec_backend.drafters.block_export import EXPRESSIBLE, export_block
from angelspec_backend.drafters.blocks import BlockNetwork
from angelspec_backend.drafters.chain import ChainNetwork
from angelspec_backend.drafters.checkpoint_files import (
    Checkpoint,
    load_strict,
    read_checkpoint,
    write_checkpoint,
)
from angelspec_backend.drafters.draft_vocab import DraftVocab
from angelspec_backend.drafters.eagle3 import Eagle3
from angelspec_backend.drafters.mtp import MTP
from angelspec_backend.drafters.spec import BLOCK_KINDS, DrafterSpec, TargetIdentity
from angelspec_backend.drafters.target_parts import TargetParts
from angelspec_backend.engine.loader import LoadError

logger = logging.getLogger(__name__)

DrafterNetwork = BlockNetwork | ChainNetwork
NETWORKS: Mapping[str, Callable[[DrafterSpec, TargetParts, DraftVocab | None], DrafterNetwork]] = {
    **dict.fromkeys(BLOCK_KINDS, BlockNetwork),
    "mtp": MTP,
    "eagle3": Eagle3,
}
NATIVE_ARCHITECTURE, SPEC = "AngelSpecDrafter", "drafter"


class Format(NamedTuple):
    """One way to store drafters."""

    name: str
    matches: Callable[[Checkpoint], bool]
    load: Callable[[Checkpoint, TargetParts], DrafterNetwork]


def load_drafter(
    path: str,
    target: TargetParts,
    *,
    dtype: torch.dtype | None = None,
    identity: TargetIdentity | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> tuple[DrafterSpec, DrafterNetwork]:
    """Load a drafter in any known format, from a local folder or a Hugging Face id.

    target: whose embedding and LM head it shares; the network is put on their device.  dtype: that of the
    target if None.  identity: what is served, for a warning if the drafter was trained for something else.
    overrides: see ``read_checkpoint``.

    Raises:
        LoadError: the checkpoint is broken or unknown, or does not fit the target; says what differs.
    """
    checkpoint = read_checkpoint(path, overrides)
    for each in FORMATS:
        if each.matches(checkpoint):
            network = each.load(checkpoint, target)
            break
    else:
        names = ", ".join(sorted(checkpoint.tensors)[:4]) or "none"
        raise LoadError(
            f"{path}: not a drafter of a known format ({', '.join(each.name for each in FORMATS)}); "
            f"its tensors are {names}, ..."
        )
    network.to(target.embed_tokens.device, dtype or target.embed_tokens.dtype)
    _warn_of_another_target(path, network.spec.target, identity or TargetIdentity())
    return network.spec, network.requires_grad_(False).eval()


def export_drafter(network: DrafterNetwork, folder: str | Path, naming: str = "native") -> None:
    """Write a drafter as safetensors and config.json.

    naming: "native" expresses every drafter.  Formats of other projects: the keys of EXPRESSIBLE for block
    drafters, the NAMINGS of mtp_format and eagle3_format for these.

    Raises:
        ValueError: the naming is unknown, or cannot express this drafter.
    """
    if naming == "native":
        config = {
            "architectures": [NATIVE_ARCHITECTURE],
            SPEC: TypeAdapter(DrafterSpec).dump_python(network.spec, mode="json"),
        }
        write_checkpoint(folder, config, network.own_tensors())
    elif naming in EXPRESSIBLE and isinstance(network, BlockNetwork):
        write_checkpoint(folder, *export_block(network, naming))
    elif naming in mtp_format.NAMINGS and isinstance(network, MTP):
        write_checkpoint(folder, *mtp_format.export_mtp(network, naming))
    elif naming in eagle3_format.NAMINGS and isinstance(network, Eagle3):
        write_checkpoint(folder, *eagle3_format.export_eagle3(network, naming))
    else:
        allowed = {"mtp": mtp_format.NAMINGS, "eagle3": eagle3_format.NAMINGS}
        names = ", ".join(allowed.get(network.spec.kind, tuple(EXPRESSIBLE)))
        raise ValueError(f"naming is '{naming}', allowed for {network.spec.kind}: native, {names}")


def _is_native(checkpoint: Checkpoint) -> bool:
    return NATIVE_ARCHITECTURE in (checkpoint.config.get("architectures") or ())


def _load_native(checkpoint: Checkpoint, target: TargetParts) -> DrafterNetwork:
    fields = checkpoint.config.get(SPEC)
    unknown = sorted(set(fields or ()) - set(DrafterSpec.__dataclass_fields__))
    if not isinstance(fields, dict) or unknown:
        raise checkpoint.refuse(f"{SPEC} in config.json", unknown or fields, "the fields of a DrafterSpec")
    try:
        spec = cast(DrafterSpec, TypeAdapter(DrafterSpec).validate_python(fields))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in (SPEC, *first["loc"]))
        raise LoadError(f"{checkpoint.path}: {where} in config.json: {first['msg']}") from error
    for field, found, expected in (
        ("target_hidden", spec.target_hidden, target.hidden_size),
        ("target_num_layers", spec.target_num_layers or target.num_layers, target.num_layers),
    ):
        if found != expected:
            raise checkpoint.refuse(field, found, f"{expected}, the target's")
    tensors = {name: tensor for name, tensor in checkpoint.tensors.items() if name != "t2d"}
    try:
        vocab = None
        if "d2t" in tensors:
            vocab = DraftVocab(tensors["d2t"], target.vocab_size)
            tensors["vocab.d2t"] = tensors.pop("d2t")
        with torch.device("meta"):
            network = NETWORKS[spec.kind](spec, target, vocab)
    except ValueError as error:
        raise LoadError(f"{checkpoint.path}: {error}") from error
    load_strict(network, checkpoint, tensors)
    return network


FORMATS: tuple[Format, ...] = (
    Format("native", _is_native, _load_native),
    Format("AngelSpec block drafter", block_formats.is_angelspec, block_formats.load_angelspec),
    Format("z-lab DFlash or DeepSpec DSpark", block_formats.is_fc_named, block_formats.load_fc_named),
    Format("MTP head", mtp_format.is_mtp, mtp_format.load_mtp),
    Format("EAGLE-3", eagle3_format.is_eagle3, eagle3_format.load_eagle3),
)
"""The first that matches loads a checkpoint."""


def _warn_of_another_target(path: str, trained_for: TargetIdentity, served: TargetIdentity) -> None:
    """Drafts for another target or mode are no error, they only agree less."""
    for field, expected in vars(trained_for).items():
        found = getattr(served, field)
        if expected and found and expected != found:
            logger.warning(
                "%s: trained for %s '%s', but '%s' is served; it may draft badly",
                path,
                field,
                expected,
                found,
            )

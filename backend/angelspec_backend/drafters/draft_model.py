"""The draft model: a smaller causal LM with the target's tokenizer writes ahead, the target checks.

It samples as the target does, with the same noise at each position, so the two agree more often than
independent samples would; the target as its own draft model agrees always.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig

from angelspec_backend.core.hidden_states import States
from angelspec_backend.core.loop_config import DrafterInfo
from angelspec_backend.core.messages import DraftOutput
from angelspec_backend.drafters.choice import Drafts, choose_tokens
from angelspec_backend.engine.batch import pack
from angelspec_backend.engine.loader import LoadError, load_tokenizer
from angelspec_backend.engine.runner import ModelRunner
from angelspec_backend.engine.sampler import SamplingRows

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DraftModelDrafter:
    """Keeps keys and values of the committed tokens in its own pool, under the target's block ids."""

    runner: ModelRunner
    name: str = "draft_model"

    @property
    def info(self) -> DrafterInfo:
        """What the loop must know of it."""
        return DrafterInfo(self.name, keeps_drafts=True, shares_blocks=True)

    def propose(
        self,
        rows: NDArray[np.void],
        feed_token_ids: NDArray[np.int32],
        block_table: NDArray[np.int32],
        hidden_states: States,
    ) -> DraftOutput:
        """Compute the fed tokens, then draft token by token for all rows that want one more.

        Drafting k tokens also stores the keys and values of the first k - 1.  A sequence longer than
        this model's context gets no drafts.  Shapes as in ``Drafter.propose``.
        """
        limit = self.runner.max_context
        length = rows["num_fed"].astype(np.int64) + rows["num_feed"]  # [num_rows]
        used = (rows["num_feed"] > 0) & (length <= limit)
        if not used.any():
            return DraftOutput.empty(len(rows))
        # The last draft is never computed, so it may lie just behind the context.
        wanted = np.where(used, np.minimum(rows["num_draft_tokens"], limit - length + 1), 0).clip(0)
        drafts, confident = Drafts.empty(wanted), bool((rows["min_chance"] > 0).any())

        batch = rows.copy()
        batch["num_computed"], batch["num_tokens"] = rows["num_fed"], rows["num_feed"]
        batch["sample"] = wanted > 0
        logits = self._forward(batch, used, feed_token_ids[np.repeat(used, rows["num_feed"])], block_table)
        active = wanted > 0  # [num_rows]
        for step in range(drafts.token_ids.shape[1]):
            params = SamplingRows.from_rows(rows[active], np.ones(active.sum(), int), length[active] + step)
            tokens, confidence = choose_tokens(logits, params, None, confident)
            active = drafts.add(step, active, tokens, confidence, rows["min_chance"])
            if not active.any():
                break
            batch["num_computed"], batch["num_tokens"], batch["sample"] = length + step, 1, 1
            logits = self._forward(batch, active, drafts.token_ids[active, step], block_table)
        return drafts.cut(rows["min_chance"]).output()

    def _forward(
        self,
        rows: NDArray[np.void],
        which: NDArray[np.bool_],
        token_ids: NDArray[np.int32],
        block_table: NDArray[np.int32],
    ) -> Tensor:
        """Compute some of the rows.  Returns the logits of those that sample, [num_sampling, vocab]."""
        table = block_table[np.repeat(which, rows["num_blocks"])]
        chosen, runner = rows[which], self.runner
        drafts = DraftOutput.empty(len(chosen))
        block_size, shapes = runner.pool.block_size, runner.graph_shapes
        return runner.forward(pack(chosen, token_ids, drafts, table, block_size, runner.device, shapes))


def check_compatible(target_path: str, draft_path: str) -> None:
    """Refuse a draft model whose token ids mean something else than the target's.

    target_path, draft_path: folders or Hugging Face ids.

    Raises:
        LoadError: says what differs.
    """
    tokenizers = [load_tokenizer(path) for path in (target_path, draft_path)]
    target, draft = ({id_: token for token, id_ in each.get_vocab().items()} for each in tokenizers)
    differing = sorted(id_ for id_ in target.keys() | draft.keys() if target.get(id_) != draft.get(id_))
    if differing:
        first = differing[0]
        raise LoadError(
            f"draft_model '{draft_path}' has another tokenizer than the target '{target_path}': "
            f"{len(differing)} token ids differ ({len(draft)} tokens against {len(target)}), the first is "
            f"id {first}: {_shown(draft, first)} against {_shown(target, first)}"
        )
    sizes = [_load_config(path).get_text_config().vocab_size for path in (target_path, draft_path)]
    if sizes[0] != sizes[1]:
        raise LoadError(
            f"draft_model '{draft_path}' has a vocabulary of {sizes[1]}, but the target '{target_path}' "
            f"one of {sizes[0]}; they must be equal"
        )
    # The ids mean the same, so this costs at most some drafts around the ends of texts.
    for name in ("bos_token_id", "eos_token_id"):
        ids = [getattr(each, name) for each in tokenizers]
        if ids[0] != ids[1]:
            logger.warning("draft_model: its tokenizer's %s is %s, the target's %s", name, ids[1], ids[0])


def _shown(tokens: dict[int, str], id_: int) -> str:
    return repr(tokens[id_]) if id_ in tokens else "nothing"


def _load_config(path: str) -> PreTrainedConfig:
    try:
        return AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise LoadError(
            f"{path}: its configuration cannot be loaded: {str(error).splitlines()[0]}"
        ) from error

"""What the processes of a server hold in memory, and what the target needs for weights and KV."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from angelspec_backend.core.config import EngineConfig
from angelspec_client import Generation
from server import TritonServer
from server_processes import stub_pid

PROCESSES = ("angelspec", "drafter", "target")
MB = 1e6
_DTYPE_BYTES = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True)
class Memory:
    """Bytes of one process: all resident pages, and with shared pages divided among their users."""

    rss: int
    pss: int


def read_memory(pid: int) -> Memory:
    """The memory of a process now."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    values = {name: 1024 * int(kb) for name, kb in re.findall(r"^(Rss|Pss):\s+(\d+) kB", text, re.MULTILINE)}
    return Memory(values["Rss"], values["Pss"])


def read_server(server: TritonServer) -> dict[str, Memory]:
    """The memory of each model's process."""
    return {name: read_memory(stub_pid(server.pid, name)) for name in PROCESSES}


def weight_bytes(target: Path) -> int:
    """Bytes of the target's weights, as they lie on the disk."""
    return sum(file.stat().st_size for file in target.glob("*.safetensors"))


def kv_bytes(generations: Sequence[Generation], config: EngineConfig, target: Path) -> int:
    """Bytes of the KV blocks that were filled by generations without a common prefix.

    Full blocks alone count: they stay cached, while the one at the end is used again.  The pool takes
    memory only once it is written, so this is what it must hold at least.
    """
    from transformers import AutoConfig  # slow to import

    model = AutoConfig.from_pretrained(target).get_text_config()
    head_dim = getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads
    per_token = 2 * model.num_hidden_layers * model.num_key_value_heads * head_dim
    size = config.block_size
    blocks = sum((g.num_input_tokens + g.num_output_tokens - 1) // size for g in generations)
    return min(blocks, config.num_blocks - 1) * size * per_token * _DTYPE_BYTES[config.dtype]

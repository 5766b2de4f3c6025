"""The arguments of the CPU kernels, as C structures; the tensors they point to must outlive the call."""

from __future__ import annotations

import ctypes

_pointer, _int, _long, _float = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float


class AttentionArgs(ctypes.Structure):
    """Mirrors AttentionArgs in native_attention.h."""

    _fields_ = (
        *[(name, _pointer) for name in ("query", "key_cache", "value_cache", "out")],
        *[(name, _pointer) for name in ("query_start", "context_lens", "block_table", "sinks")],
        *[(name, _long) for name in ("query_stride", "key_stride", "value_stride")],
        *[(name, _int) for name in ("num_tokens", "num_rows", "max_blocks", "num_heads", "num_kv_heads")],
        *[(name, _int) for name in ("key_dim", "value_dim", "block_size", "sliding_window")],
        *[(name, _int) for name in ("bidirectional", "num_threads")],
        *[(name, _float) for name in ("scale", "softcap")],
    )


class RopeArgs(ctypes.Structure):
    """Mirrors RopeArgs in native_rows.h."""

    _fields_ = (
        *[
            (name, _pointer)
            for name in ("qkv", "key_cache", "value_cache", "cos_sin", "query_norm", "key_norm")
        ],
        *[(name, _pointer) for name in ("positions", "slot_mapping")],
        *[(name, _long) for name in ("key_stride", "value_stride")],
        *[(name, _int) for name in ("num_tokens", "num_heads", "num_kv_heads", "head_dim", "rotary_dim")],
        *[(name, _int) for name in ("block_size", "num_threads")],
        ("eps", _float),
    )


class LinearArgs(ctypes.Structure):
    """Mirrors LinearArgs in native_linear_parts.h."""

    _fields_ = (
        *[(name, _pointer) for name in ("x", "weight", "scale", "bias", "out")],
        *[(name, _long) for name in ("rows", "in_features", "out_features")],
        *[(name, _int) for name in ("gated", "weight_bits", "kernel", "num_threads")],
    )


class SampleArgs(ctypes.Structure):
    """Mirrors SampleArgs in native_sampling.h."""

    _fields_ = (
        *[(name, _pointer) for name in ("logits", "token_of", "class_of", "seed", "position")],
        *[(name, _pointer) for name in ("temperature", "top_k", "top_p", "min_p", "tokens")],
        *[(name, _long) for name in ("rows", "columns", "vocab")],
        ("num_threads", _int),
    )


class LayerArgs(ctypes.Structure):
    """Mirrors LayerArgs in native_layers.h."""

    _fields_ = (
        *[(name, LinearArgs) for name in ("qkv", "attention_out", "gate_up", "down")],
        *[(name, _pointer) for name in ("input_norm", "post_norm", "query_norm", "key_norm")],
        *[(name, _pointer) for name in ("key_cache", "value_cache")],
        ("sliding_window", _long),
    )


class ForwardArgs(ctypes.Structure):
    """Mirrors ForwardArgs in native_layers.h."""

    _fields_ = (
        ("layers", _pointer),
        ("head", LinearArgs),
        ("attention", AttentionArgs),
        ("rope", RopeArgs),
        *[(name, _pointer) for name in ("token_ids", "embedding", "final_norm", "logits_index", "logits")],
        *[(name, _pointer) for name in ("taps", "tapped", "hidden", "delta", "qkv", "normed")],
        *[(name, _pointer) for name in ("attended", "activated", "seconds")],
        *[(name, _long) for name in ("num_layers", "num_tokens", "num_logits", "num_taps")],
        *[(name, _long) for name in ("hidden_size", "attended_size", "inter")],
        ("num_threads", _int),
        ("eps", _float),
    )


class Op(ctypes.Structure):
    """Mirrors Op in native_program.h, as the classes below mirror the arguments of its kinds."""

    _fields_ = (("kind", _long), ("rows", _pointer), ("args", _pointer))


class RowsArgs(ctypes.Structure):
    _fields_ = (
        *[(name, _pointer) for name in ("x", "index", "nonzero", "residual", "weight", "out")],
        *[(name, _long) for name in ("x_stride", "out_stride", "n")],
        ("eps", _float),
    )


class MixArgs(ctypes.Structure):
    _fields_ = (
        *[(name, _pointer) for name in ("x", "weight", "out")],
        *[(name, _long) for name in ("count", "n")],
    )


class ArgmaxArgs(ctypes.Structure):
    _fields_ = (*[(name, _pointer) for name in ("logits", "names", "out", "probability")], ("n", _long))


class CutArgs(ctypes.Structure):
    _fields_ = tuple((name, _pointer) for name in ("probability", "before", "product", "least", "next"))

"""Hidden states as tensors of torch: read out of messages, and copied and joined as arrays of numpy are."""

from __future__ import annotations

import numpy as np
import torch

from angelspec_backend.core.hidden_states import IN_NUMPY
from angelspec_backend.triton import codec, device_states


class Message:
    """What a tensor of the python backend offers, over one of torch."""

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self._name, self._tensor = name, tensor

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray:
        return self._tensor.numpy()

    def to_dlpack(self):
        return torch.utils.dlpack.to_dlpack(self._tensor)


def test_hidden_states_are_read_without_a_copy_and_all_else_as_arrays():
    step, states = torch.arange(3, dtype=torch.int32), torch.arange(6, dtype=torch.uint8)
    for name in (codec.FEED_STATES, codec.HIDDEN_STATES):
        arrays = device_states.read([Message(codec.STEP, step), Message(name, states)])
        assert isinstance(arrays[codec.STEP], np.ndarray)
        assert arrays[name].data_ptr() == states.data_ptr()
        assert arrays[name].tolist() == states.tolist()


def test_read_states_hold_on_to_the_memory_of_their_message():
    states = device_states.read([Message(codec.FEED_STATES, torch.full((1 << 20,), 7, dtype=torch.uint8))])
    torch.zeros(1 << 20, dtype=torch.uint8)
    assert int(states[codec.FEED_STATES].sum()) == 7 << 20


def test_tensors_are_copied_and_joined_as_arrays_are():
    arrays = [np.arange(6, dtype=np.uint8), np.arange(4, dtype=np.uint8)]
    tensors = [torch.tensor(array) for array in arrays]
    in_torch = device_states.IN_TORCH
    assert in_torch.join(tensors).tolist() == IN_NUMPY.join(arrays).tolist()
    for copy, original in ((in_torch.copy(tensors[0]), tensors[0]), (IN_NUMPY.copy(arrays[0]), arrays[0])):
        assert copy.tolist() == original.tolist()
        original[0] = 99
        assert copy[0] == 0

"""The wire format preserves every dtype and every bit."""

import doctest
import gc
import pickle
import warnings

import numpy as np
import pytest
import torch

import coati.wire
from coati.wire import decode, encode, tensor_of

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]


def test_docstring_examples_run():
    result = doctest.testmod(coati.wire)
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3)], ids=str)
def test_every_bit_survives_in_every_dtype_and_shape(dtype, shape):
    count = int(np.prod(shape))
    original = (torch.arange(count).float() - 1.5).reshape(shape).to(dtype)
    restored = decode(pickle.loads(pickle.dumps(encode(original))))
    assert restored.dtype == dtype
    assert restored.shape == original.shape
    assert encode(restored).array.tobytes() == encode(original).array.tobytes()


def test_nan_payloads_and_negative_zero_survive():
    bits = torch.tensor([0x7FC1, -0x8000, 0x7F80], dtype=torch.int16)  # a NaN with payload, -0.0, inf
    original = bits.view(torch.bfloat16)
    assert decode(encode(original)).view(torch.int16).tolist() == bits.tolist()


def test_bfloat16_takes_two_bytes_per_number():
    assert encode(torch.zeros(8, dtype=torch.bfloat16)).array.nbytes == 16


def test_only_non_contiguous_cpu_tensors_are_copied():
    tensor = torch.arange(6.0).reshape(2, 3)
    assert encode(tensor).array.ctypes.data == tensor.data_ptr()
    transposed = encode(tensor.T).array
    assert transposed.flags.c_contiguous
    assert decode(encode(tensor.T)).tolist() == tensor.T.tolist()


def test_a_decoded_tensor_has_memory_of_its_own():
    tensor = torch.zeros(2)
    decode(encode(tensor)).fill_(1.0)
    assert tensor.tolist() == [0.0, 0.0]


def test_a_read_only_array_can_be_copied_into_a_writable_tensor():
    wire = encode(torch.ones(2))
    wire.array.flags.writeable = False
    tensor = decode(wire)
    tensor.zero_()
    assert wire.array.tolist() == [1.0, 1.0]


def test_a_read_only_array_is_wrapped_without_a_warning_and_stays_alive(quick_collections):
    for shape in ((2, 3), (), (0, 3)):
        array = np.ones(shape, dtype=np.int16)
        array.flags.writeable = False
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            tensor = tensor_of(array)
        assert tensor.data_ptr() == array.ctypes.data or tensor.numel() == 0
        del array
        gc.collect()
        assert torch.equal(tensor, torch.ones(shape, dtype=torch.int16))


def test_a_parameter_is_encoded_without_its_graph():
    assert not decode(encode(torch.nn.Parameter(torch.ones(2)))).requires_grad

"""Digests of tensors: the same bits, the same digest, wherever they lie; whatever else has changed is seen."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_128

from agent_client.state.digest import Digests


def of(*tensors: torch.Tensor, number: int = 0) -> tuple[int, int]:
    return Digests().take(tensors, number).read()


def drawn(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_it_is_the_same_on_every_machine() -> None:
    tensor = torch.arange(1001, dtype=torch.int32)
    expected = xxh3_128(tensor.numpy().tobytes()).digest()
    assert b"".join(word.to_bytes(8, signed=True) for word in of(tensor)) == expected


def test_where_the_bits_lie_does_not_matter() -> None:
    tensor = drawn(1, 33, 7)
    shifted = torch.cat([torch.zeros(1), tensor.reshape(-1)])[1:].view(33, 7)
    assert of(tensor) == of(tensor.clone()) == of(shifted) == of(tensor.t().contiguous().t())
    with_gaps = tensor.repeat_interleave(2, dim=1)[:, ::2]
    assert of(with_gaps) == of(tensor)
    assert of(with_gaps.flatten()[::2]) == of(tensor.flatten()[::2].clone())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.bool])
def test_one_bit_of_any_type_is_seen(dtype: torch.dtype) -> None:
    tensor = drawn(2, 101, dtype=dtype)
    before = of(tensor)
    for place in (0, 50, 100):
        changed = tensor.clone()
        changed.view(torch.uint8)[place * tensor.element_size()] ^= 1
        assert of(changed) != before


def _swap(tensor: torch.Tensor, i: int, j: int) -> None:
    tensor[i], tensor[j] = tensor[j].clone(), tensor[i].clone()


def _negate(tensor: torch.Tensor, i: int, j: int) -> None:
    tensor[i], tensor[j] = -tensor[i], -tensor[j]


def _move(tensor: torch.Tensor, i: int, j: int) -> None:
    """The sum of all words stays."""
    words = tensor.view(torch.int32)
    words[i] += 1
    words[j] -= 1


@given(st.integers(0, 999), st.integers(0, 999), st.sampled_from([_swap, _negate, _move]))
def test_what_a_plain_sum_would_miss(i: int, j: int, change: Callable[[torch.Tensor, int, int], None]) -> None:
    tensor = drawn(3, 1000)
    changed = tensor.clone()
    change(changed, i, j)
    assert (of(changed) == of(tensor)) is torch.equal(changed.view(torch.int32), tensor.view(torch.int32))


def test_windows_take_turns_and_cover_all() -> None:
    tensors = [drawn(4, 40), drawn(5, 3), drawn(6, 100)]
    digests = Digests(window_bytes=64)
    before = [digests.take(tensors, number).read() for number in range(30)]
    tensors[2][77] += 1
    after = [digests.take(tensors, number).read() for number in range(30)]
    changed = [number for number in range(30) if before[number] != after[number]]
    assert 0 < len(changed) < 15
    tensors[2][77] -= 1


def test_of_gradients_those_that_are_there() -> None:
    parameters = [torch.nn.Parameter(drawn(7, 5)), torch.nn.Parameter(drawn(8, 5))]
    parameters[0].grad = drawn(9, 5)
    taken = Digests().take(parameters, 0, lambda parameter: parameter.grad).read()
    assert taken == of(drawn(9, 5))


def test_nothing_has_a_digest_too() -> None:
    assert of() == of(torch.zeros(0)) != of(torch.zeros(1))

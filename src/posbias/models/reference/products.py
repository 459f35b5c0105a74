"""Matrix products and softmax on stacked tensors, with gradients arranged for many small matrices.

A product with one row or column is a product of vectors: multiplied element by element, not one matrix at a time. Every
gradient comes out in its tensor's own layout, so that nothing is copied on the way. The mathematics is PyTorch's own;
these functions have first derivatives only, which is what training asks for.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

SHORT, SHORT_ALONE = 20, 16
"""Keys up to which a softmax is faster across rows than along them (of several rows, of one): a row does not fill two
vector instructions, and across rows many are normalised at once."""


class _Dots(torch.autograd.Function):
    """a b^T."""

    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor) -> Tensor:
        ctx.save_for_backward(left, right)
        return torch.bmm(left, right.transpose(1, 2))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        left, right = ctx.saved_tensors
        return (
            _product(gradient, right) if ctx.needs_input_grad[0] else None,
            _product(gradient.transpose(1, 2), left) if ctx.needs_input_grad[1] else None,
        )


class _Product(torch.autograd.Function):
    """a b."""

    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor) -> Tensor:
        ctx.save_for_backward(left, right)
        return torch.bmm(left, right)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        left, right = ctx.saved_tensors
        back = None
        if ctx.needs_input_grad[0]:
            # Turned as `left` lies in memory.
            turned = left.stride(-1) != 1
            back = _product(right, gradient.transpose(1, 2)) if turned else _product(gradient, right.transpose(1, 2))
            back = back.transpose(1, 2) if turned else back
        return back, _product(left.transpose(1, 2), gradient) if ctx.needs_input_grad[1] else None


def _product(left: Tensor, right: Tensor) -> Tensor:
    """a b; outer products of vectors are no sums."""
    return left * right if left.shape[2] == 1 else torch.bmm(left, right)


def dots(
    left: Float[Tensor, "*stack row feature"], right: Float[Tensor, "*stack key feature"]
) -> Float[Tensor, "*stack row key"]:
    """Dot products of every row with every key."""
    found: Tensor = _Dots.apply(left.flatten(0, -3), right.flatten(0, -3))  # type: ignore[no-untyped-call]
    return found.view(*left.shape[:-1], right.shape[-2])


def mixed(
    maps: Float[Tensor, "*stack row key"], values: Float[Tensor, "*stack key feature"]
) -> Float[Tensor, "*stack row feature"]:
    """Rows of `values`, mixed."""
    found: Tensor = _Product.apply(maps.flatten(0, -3), values.flatten(0, -3))  # type: ignore[no-untyped-call]
    return found.view(*maps.shape[:-1], values.shape[-1])


def attention_of(
    query: Float[Tensor, "member batch head row feature"],
    key: Float[Tensor, "member batch #head position feature"],
    bias: Float[Tensor, "member one head row position"],
) -> Float[Tensor, "member batch head row position"]:
    """softmax(q k^T + bias) over the keys, which all heads may share."""
    heads, rows = query.shape[2:4]
    if key.shape[2] != heads:
        query, bias = query.flatten(2, 3)[:, :, None], bias.flatten(2, 3)[:, :, None]
    if key.shape[3] <= (SHORT if rows > 1 else SHORT_ALONE):
        maps = torch.softmax(dots(key, query) + bias.transpose(3, 4), dim=3).transpose(3, 4)
    else:
        maps = torch.softmax(dots(query, key) + bias, dim=4)
    return maps.reshape(*maps.shape[:2], heads, rows, -1)

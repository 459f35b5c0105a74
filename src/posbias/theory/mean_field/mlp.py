"""The MLP branch in the infinite-width limit, plain and gated (docs/theory, section 4).

Forward: Y = v_down d_ff F(pre) with pre = v_up d x + b; gated: Y = v_down d_ff F_gate(pre_gate) pre_up. Backward: the
derivative of the same products, one factor at a time.
"""

from posbias.theory.mean_field.bins import Kernel
from posbias.theory.mean_field.spec import LinearSpec, MlpSpec


def preactivation(linear: LinearSpec, width: int, x: Kernel) -> Kernel:
    """Kernel of W x + b."""
    return x.scaled(linear.variance * width, offset=linear.bias)


def mlp_forward(mlp: MlpSpec, width: int, x: Kernel) -> Kernel:
    """Kernel of the branch's output, before any post-norm, from the kernel of its normalised input."""
    if mlp.gate is None:
        hidden, _ = mlp.activation.kernels(preactivation(mlp.up, width, x))
    else:
        gated, _ = mlp.activation.kernels(preactivation(mlp.gate, width, x))
        hidden = gated * preactivation(mlp.up, width, x)
    return hidden.scaled(mlp.down.variance * mlp.hidden, offset=mlp.down.bias)


def mlp_backward(mlp: MlpSpec, width: int, x: Kernel, gradient: Kernel) -> Kernel:
    """Gradient kernel at the branch's normalised input from that at its output (the branch alone, no residual)."""
    factor = mlp.down.variance * width * mlp.hidden
    if mlp.gate is None:
        _, slope = mlp.activation.kernels(preactivation(mlp.up, width, x))
        return gradient * slope.scaled(factor * mlp.up.variance)
    value, slope = mlp.activation.kernels(preactivation(mlp.gate, width, x))
    through_up = value.scaled(factor * mlp.up.variance)
    through_gate = (slope * preactivation(mlp.up, width, x)).scaled(factor * mlp.gate.variance)
    return gradient * (through_up + through_gate)

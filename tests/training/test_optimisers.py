"""Settings of optimisers that are refused (that training is PyTorch's own: test_trainer)."""

import pytest

from posbias import UsageError
from posbias.training import OPTIMISERS


@pytest.mark.parametrize(
    ("spelled", "message"),
    [
        ("adam(learning_rate=0)", "adam: learning_rate must be a finite number > 0, got 0"),
        ("adamw(weight_decay=-1)", "adamw: weight_decay must be a finite number >= 0, got -1"),
        ("adamw(beta2=1)", "adamw: beta2 must be a number >= 0 and < 1, got 1"),
        ("adam(epsilon=0)", "adam: epsilon must be a finite number > 0, got 0"),
        ("sgd(momentum=0.5)", "optimiser sgd left posbias after 0.1.0: adam or adamw"),
        ("adagrad", "unknown optimiser 'adagrad'; known: adam, adamw"),
        ("adam(weight_decay=1)", "parameters of adam: learning_rate, beta1, beta2, epsilon"),
    ],
)
def test_wrong_settings_are_refused(spelled, message):
    with pytest.raises(UsageError) as caught:
        OPTIMISERS.parse(spelled)
    assert message in str(caught.value)

"""Text with key-value pairs in it: what is inserted where, what is scored, and that every slot is as likely."""

import torch

from posbias.tasks.synthetic import IGNORED, TextWithPairs, stack_tasks
from posbias.tasks.synthetic.base import Purpose
from posbias.tasks.synthetic.text import LETTERS, folded_corpus

TASK = TextWithPairs(context=5, spacing=3, pairs=2, vocabulary=4, keys=6, read=7)


def spelled(tokens: torch.Tensor) -> str:
    return "".join(LETTERS[int(token)] for token in tokens if token < len(LETTERS))


def asked_slots(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The slot where the pair that answers stands, found in the inputs alone."""
    key = inputs[:, -1] - len(LETTERS) - TASK.keys * TASK.vocabulary
    pair = len(LETTERS) + key * TASK.vocabulary + targets[:, -1] - len(LETTERS)
    found = inputs[:, :-1] == pair[:, None]
    assert (found.sum(1) == 1).all()
    return found.long().argmax(1) // TASK.spacing


def test_the_text_goes_on_around_the_pairs_and_its_last_characters_are_targets() -> None:
    batch, read = stack_tasks([TASK], [3]).batch(0, 40), ""
    corpus = spelled(folded_corpus(Purpose.TRAINING))
    for inputs, targets in zip(batch.inputs[0], batch.targets[0], strict=True):
        text, pairs = spelled(inputs), (inputs[:-1] >= len(LETTERS)).nonzero()[:, 0]
        assert len(text) == 13
        assert text in corpus
        assert (pairs % TASK.spacing == 0).all()
        for row, target in zip(TASK.rows[:-1], targets[:-1], strict=True):
            following = inputs[row + 1]
            assert target == (following if following < len(LETTERS) else IGNORED)
        read += text
    assert len(set(read)) > 20


def test_every_slot_is_asked_for_equally_often_and_holds_the_answer() -> None:
    batch = stack_tasks([TASK], [0]).batch(1, 5_000)
    counts = asked_slots(batch.inputs[0], batch.targets[0]).bincount(minlength=5)
    assert ((counts - 1000).abs() < 5 * 1000**0.5).all()


def test_an_evaluation_asks_for_every_slot_in_turn() -> None:
    seen: list[torch.Tensor] = []

    def predict(inputs: torch.Tensor) -> torch.Tensor:
        """Right about the pairs of the first two slots, and uniform over all outputs otherwise."""
        seen.append(inputs)
        logits = torch.zeros(*inputs.shape[:2], len(TASK.rows), TASK.n_outputs)
        key = inputs[..., -1:] - len(LETTERS) - TASK.keys * TASK.vocabulary
        pairs = inputs[..., [0, TASK.spacing]] - len(LETTERS)
        right = (pairs >= 0) & (pairs // TASK.vocabulary == key)
        named = torch.where(right, pairs % TASK.vocabulary, -len(LETTERS)).amax(-1)
        logits[:, :, -1] += 9 * torch.nn.functional.one_hot(named + len(LETTERS), TASK.n_outputs)
        return logits

    scores = stack_tasks([TASK], [0]).evaluate(predict, examples=50)
    assert scores["accuracy_by_position"].tolist() == [[1, 1, 0, 0, 0]]
    assert abs(scores["text_loss"][0] - torch.tensor(float(TASK.n_outputs)).log().item()) < 1e-6
    held_out = spelled(folded_corpus(Purpose.EVALUATION))
    assert all(spelled(each) in held_out for each in seen[0][0])

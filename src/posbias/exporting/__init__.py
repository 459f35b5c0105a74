"""A method that is a change of weights, as files that other programs load: PEFT directories, checkpoints, GGUF."""

from posbias.exporting.export import Exported, export

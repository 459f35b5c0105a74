"""Responders: local models with shared prefixes, and OpenAI-compatible servers with an answer cache."""

from posbias.evaluation.options import LocalOptions
from posbias.evaluation.responders.base import AnswerScore, PlantedResponder, Reply, Request, Responder, Response
from posbias.evaluation.responders.client import ServerOptions
from posbias.evaluation.responders.local import LocalResponder
from posbias.evaluation.responders.server import ServerResponder

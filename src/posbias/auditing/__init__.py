"""The examination of one model as a whole: as trained and at initialisation, beside every theory and its answers."""

from posbias.auditing.behaviour import audit_behaviour, link_behaviour
from posbias.auditing.run import AuditOptions, audit

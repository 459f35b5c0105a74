"""The audit: one model examined as trained and at birth, beside every theory that applies, in one resumable run."""

from posbias.auditing.options import AuditOptions
from posbias.auditing.run import Audit, audit

__all__ = ["Audit", "AuditOptions", "audit"]

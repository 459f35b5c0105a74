"""The audit: one model examined as trained and at birth, beside every theory that applies, in one resumable run."""

from posbias.audit.options import AuditOptions
from posbias.audit.run import Audit, audit

__all__ = ["Audit", "AuditOptions", "audit"]

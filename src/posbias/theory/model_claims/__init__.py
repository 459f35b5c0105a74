"""Published claims put to the test on one model: its own attention and its measured residual shares."""

# Imported for their claims, which register themselves.
from posbias.theory.model_claims import collapse, order  # noqa: F401
from posbias.theory.model_claims.claim import MODEL_CLAIMS, ModelClaim, ModelVerdict, Premise, verify_model
from posbias.theory.model_claims.run import ModelRun, run_model

__all__ = ["MODEL_CLAIMS", "ModelClaim", "ModelRun", "ModelVerdict", "Premise", "run_model", "verify_model"]

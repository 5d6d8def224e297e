"""What becomes of samples: who may issue them, and which have arrived."""

from coati.ledger.admission import UNBOUNDED, AdmissionGate, Deal, WorkShare
from coati.ledger.ages import Ages, age_metrics, ages_of
from coati.ledger.deliveries import DeliveryLog
from coati.ledger.membership import Membership, Place, PromptPart, Standing
from coati.ledger.rounds import RoundOrder

__all__ = [
    "UNBOUNDED",
    "AdmissionGate",
    "Ages",
    "Deal",
    "DeliveryLog",
    "Membership",
    "Place",
    "PromptPart",
    "RoundOrder",
    "Standing",
    "WorkShare",
    "age_metrics",
    "ages_of",
]

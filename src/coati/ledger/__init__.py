"""What becomes of samples: who may issue them, and which have arrived."""

from coati.ledger.admission import UNBOUNDED, AdmissionGate, Deal, WorkShare
from coati.ledger.ages import Ages, age_metrics, ages_of
from coati.ledger.deliveries import DeliveryLog
from coati.ledger.membership import Membership, Place, PromptPart, Standing
from coati.ledger.rounds import RoundOrder
from coati.ledger.staleness import BoundSchedule, SignalMeter, StalenessController, VersionSignals

__all__ = [
    "UNBOUNDED",
    "AdmissionGate",
    "Ages",
    "BoundSchedule",
    "Deal",
    "DeliveryLog",
    "Membership",
    "Place",
    "PromptPart",
    "RoundOrder",
    "SignalMeter",
    "StalenessController",
    "Standing",
    "VersionSignals",
    "WorkShare",
    "age_metrics",
    "ages_of",
]

"""What becomes of samples: who may issue them, and which have arrived."""

from coati.ledger.admission import UNBOUNDED, AdmissionGate, WorkShare
from coati.ledger.ages import Ages, age_metrics, ages_of
from coati.ledger.deliveries import DeliveryLog
from coati.ledger.rounds import RoundOrder
from coati.ledger.staleness import BoundSchedule, SignalMeter, StalenessController, VersionSignals

__all__ = [
    "UNBOUNDED",
    "AdmissionGate",
    "Ages",
    "BoundSchedule",
    "DeliveryLog",
    "RoundOrder",
    "SignalMeter",
    "StalenessController",
    "VersionSignals",
    "WorkShare",
    "age_metrics",
    "ages_of",
]

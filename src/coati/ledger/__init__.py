"""What becomes of samples: who may issue them, and which have arrived."""

from coati.ledger.admission import UNBOUNDED, AdmissionGate, WorkShare
from coati.ledger.ages import Ages, ages_of
from coati.ledger.deliveries import DeliveryLog
from coati.ledger.rounds import RoundOrder

__all__ = ["UNBOUNDED", "AdmissionGate", "Ages", "DeliveryLog", "RoundOrder", "WorkShare", "ages_of"]

"""What becomes of samples: who may issue them, and which have arrived."""

from coati.ledger.admission import UNBOUNDED, AdmissionGate, WorkShare
from coati.ledger.ages import Ages, ages_of
from coati.ledger.deliveries import DeliveryLog

__all__ = ["UNBOUNDED", "AdmissionGate", "Ages", "DeliveryLog", "WorkShare", "ages_of"]

"""What becomes of samples: who may make them, when they are trained on, and the account of it."""

from coati.ledger.ages import Ages, age_metrics, ages_of
from coati.ledger.leases import Ledger
from coati.ledger.rules import Lease, LeaseRequest, LedgerRules

__all__ = ["Ages", "Lease", "LeaseRequest", "Ledger", "LedgerRules", "age_metrics", "ages_of"]

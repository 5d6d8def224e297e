"""What becomes of samples: who may make them, when they are trained on, and the account of it."""

from coati.ledger.leases import Ledger
from coati.ledger.rules import Lease, LeaseRequest, LedgerRules

__all__ = ["Lease", "LeaseRequest", "Ledger", "LedgerRules"]

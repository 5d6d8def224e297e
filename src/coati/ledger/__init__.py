"""Leases: which maker makes which samples, when they are trained on, and the account of their fates."""

from coati.ledger.leases import Ledger
from coati.ledger.rules import Lease, LeaseRequest, LedgerRules

__all__ = ["Lease", "LeaseRequest", "Ledger", "LedgerRules"]
